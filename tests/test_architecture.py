"""The house: imports point downwards only, private torch stays in one file, nothing prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxdp
import fxdp.passes

ROOT = Path(fxdp.__file__).parent
FILES = sorted(
    [f for f in ROOT.rglob("*.py") if "passes" not in f.relative_to(ROOT).parts]
    + list((ROOT / "passes").glob("*.py"))
)

GROUND = (
    "errors",
    "settings",
    "torch_compat",
    "placements",
    "symbols",
    "ir",
    "library",
    "level",
    "options",
    "slots",
    "types",
    "seeds",
    "moments",
    "standardize",
    "ctc",
    "arrangement",
    "collection",
)
"""Import nothing of ours but one another."""

LAYERS: list[tuple[str, ...]] = [
    GROUND,
    ("annotations", "parts", "links", "dtensor_specs", "schedule", "planner", "skip", "stand_in"),
    ("graph_text", "data_mesh", "mesh", "models", "rules", "cost", "transport"),
    (
        "capture",
        "report",
        "lockstep",
        "plan",
        "placing",
        "coverage",
        "remedies",
        "explain",
        "refusals",
    ),
    ("staging",),
    ("pass_manager", "verifier"),
    (
        "runtime.collectives",
        "runtime.extrema",
        "runtime.agreement",
        "runtime.drawing",
        "runtime.failure",
        "runtime.first_only",
        "runtime.held",
        "runtime.optimizers",
        "runtime.recent",
        "runtime.stable",
        "runtime.state",
        "runtime.streams",
        "runtime.transport",
    ),
    ("passes", "lowering"),
    (
        "runtime.calls",
        "runtime.kinds",
        "runtime.program",
        "runtime.step",
        "runtime.contents",
        "runtime.lengths",
        "runtime.outputs",
    ),
    ("runtime.chains",),
    ("compiler",),
    ("pipeline",),
    ("runtime.programs", "runtime.sizes", "runtime.staged", "dry_run", "check"),
    ("module",),
    ("__init__",),
    ("demo", "commands", "cli", "__main__"),
]
"""From the ground up: a file imports from its own layer and those below."""


def module_name(file: Path) -> str:
    """`rules.chooser` for `fxdp/rules/chooser.py`, `rules` for its `__init__.py`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for file in FILES:
        yield module_name(file), ast.parse(file.read_text())


def imported(tree: ast.Module) -> set[str]:
    """Every module that a file imports, at the top or in functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(tree: ast.Module) -> set[str]:
    """The modules of fxdp among them, without `fxdp.`."""
    names = {name.removeprefix("fxdp.") for name in imported(tree) if name.startswith("fxdp.")}
    return {name for name in names if (ROOT / name.replace(".", "/")).exists() or _is_file(name)}


def _is_file(name: str) -> bool:
    return (ROOT / (name.replace(".", "/") + ".py")).exists()


def layer(name: str) -> int:
    """The layer of a module: of the longest prefix that is listed."""
    prefixes = [".".join(name.split(".")[:n]) for n in range(name.count(".") + 1, 0, -1)]
    for prefix in prefixes:
        for i, names in enumerate(LAYERS):
            if prefix in names:
                return i
    raise AssertionError(f"fxdp.{name} has no layer: add it to LAYERS")


def test_imports_point_downwards() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, tree in trees()
        for other in ours(tree)
        if other != "runtime" and layer(other) > layer(name) and not other.startswith("runtime.__")
    ]
    assert [line for line in upwards if line not in EXCEPTIONS] == []


EXCEPTIONS: tuple[str, ...] = ()


def test_the_ground_imports_nothing_of_ours() -> None:
    for name, tree in trees():
        if name in GROUND:
            assert {other.split(".")[0] for other in ours(tree)} <= set(GROUND), name


def test_rules_know_neither_passes_nor_the_runtime() -> None:
    forbidden = {"passes", "compiler", "runtime", "lowering", "pass_manager", "verifier", "module", "capture"}
    for name, tree in trees():
        if name.startswith("rules"):
            assert not {other.split(".")[0] for other in ours(tree)} & forbidden, name


def test_the_runtime_imports_no_pass() -> None:
    for name, tree in trees():
        if name.startswith(("runtime", "links")) and name not in ("runtime.programs", "runtime.staged"):
            assert not {other.split(".")[0] for other in ours(tree)} & {
                "passes",
                "pass_manager",
                "compiler",
            }, name


def test_passes_do_not_import_each_other() -> None:
    for name, tree in trees():
        if name.startswith("passes."):
            assert not {other for other in ours(tree) if other.startswith("passes")}, name


def test_nobody_imports_the_demo() -> None:
    for name, tree in trees():
        if not name.startswith(("demo", "cli", "__main__")):
            assert not {other for other in ours(tree) if other.startswith("demo")}, name


def test_private_torch_is_imported_in_one_file() -> None:
    private = []
    for name, tree in trees():
        if name == "torch_compat":
            continue
        private += [f"{name}: {other}" for other in imported(tree) if other.startswith("torch._")]
        private += [f"{name}: {ast.unparse(node)}" for node in ast.walk(tree) if _is_private_torch(node)]
    assert private == []


def _is_private_torch(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr.startswith("_")
    )


def test_passes_are_imported_as_fxdp_passes() -> None:
    for name, tree in trees():
        assert not {other for other in imported(tree) if other.split(".")[0] == "passes"}, name


def test_nothing_prints_but_the_command_line() -> None:
    for name, tree in trees():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        prints = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert not prints or name.startswith(("cli", "commands", "demo", "__main__")), name


def test_the_environment_is_read_in_settings() -> None:
    for name, tree in trees():
        reads = [
            n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
        ]
        assert not reads or name in ("settings", "demo.launch"), name


def test_passes_touch_meta_through_annotations() -> None:
    allowed = {"annotations", "torch_compat", "dtensor_specs"}
    for name, tree in trees():
        if name.startswith("passes."):
            uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "meta"]
            assert not uses or name in allowed, name


@pytest.mark.parametrize("module", [fxdp, fxdp.passes])
def test_all_is_sorted_and_real(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []


def test_public_names() -> None:
    assert set(fxdp.__all__) >= {"CompiledModule", "FxdpError", "Plan", "compile"}
    errors = [getattr(fxdp, name) for name in fxdp.__all__ if name.endswith("Error")]
    assert all(issubclass(error, fxdp.FxdpError) for error in errors)


def test_one_pass_per_file_named_after_it() -> None:
    for name, tree in trees():
        if name.startswith("passes."):
            classes = [
                n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
            ]
            expected = "".join(word.capitalize() for word in name.removeprefix("passes.").split("_"))
            assert classes[-1] == expected, "the pass is the last class of its file"
            assert getattr(fxdp.passes, expected).name == name.removeprefix("passes.").replace("_", "-")
            assert (ROOT.parent / "tests" / "passes" / f"test_{name.removeprefix('passes.')}.py").exists()
