"""The house: imports point strictly downwards, names occur once, private torch has one room."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxdp
import fxdp.passes
import fxdp.rules
from tests.rooms import LAYERS, SIZES, WINGS, contributing, floor

pytestmark = pytest.mark.xdist_group("architecture")  # one worker reads all files

ROOT = Path(fxdp.__file__).parent
FILES = sorted(
    [f for f in ROOT.rglob("*.py") if "passes" not in f.relative_to(ROOT).parts]
    + list((ROOT / "passes").glob("*.py"))
)


def module_name(file: Path) -> str:
    """`rules.chooser` for `fxdp/rules/chooser.py`, `rules` for its `__init__.py`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(module_name(file), parsed(file)) for file in FILES]


@functools.cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """All of them: to walk through a tree takes as long as to parse it."""
    return list(ast.walk(tree))


@functools.cache
def imported(tree: ast.Module) -> frozenset[str]:
    """Every module that a file imports, at the top or in functions."""
    found: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
def ours(tree: ast.Module) -> set[str]:
    """The modules of fxdp among them, without `fxdp.`; its face for what it defines itself."""
    names = {name.removeprefix("fxdp.") for name in imported(tree) if name.startswith("fxdp.")}
    known = {name for name in names if (ROOT / name.replace(".", "/")).exists() or _is_file(name)}
    return known | {"__init__" for name in names - known if "." not in name}


@functools.cache
def _is_file(name: str) -> bool:
    return (ROOT / (name.replace(".", "/") + ".py")).exists()


def room(name: str) -> str:
    """The room of a module, or the file of the top level that it is; `__main__` is the door of `cli`."""
    return name.partition(".")[0].replace("__main__", "cli")


def test_a_room_imports_only_what_stands_below_it() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, tree in trees()
        for other in ours(tree)
        if room(other) != room(name) and floor(room(other)) >= floor(room(name))
    ]
    assert wrong == []


def test_rooms_are_joined_by_few_arrows() -> None:
    """A room that begins to import one more is a decision: 118 are what one can hold in mind on a sheet."""
    arrows = {(room(name), room(other)) for name, tree in trees() for other in ours(tree)}
    assert len([one for one in arrows if one[0] not in (one[1], *WINGS)]) <= 118


def test_there_are_few_floors() -> None:
    assert len(LAYERS) <= 13


def test_a_folder_is_seen_at_a_glance() -> None:
    counts = Counter(file.parent for file in FILES)
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}


def test_a_room_keeps_its_size() -> None:
    lines, names = Counter[str](), Counter[str]()
    for file in FILES:
        inside = room(module_name(file))
        lines[inside] += file.read_bytes().count(b"\n")
        names[inside] += len(set(_public(parsed(file).body)))
    found = {name: (lines[name], names[name]) for name in lines if (ROOT / name).is_dir()}
    wide = {name: size for name, size in found.items() if any(map(operator.gt, size, SIZES[name]))}
    assert wide == {}, f"lines and public names; at most { {name: SIZES[name] for name in wide} }"
    assert found.keys() == SIZES.keys()


def _public(body: list[ast.stmt]) -> Iterator[str]:
    """The names that a module's statements bind, without imports and private ones."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        else:
            bound = []
        yield from (name for name in bound if not name.startswith("_"))


def test_no_room_of_the_core_imports_a_wing() -> None:
    """Wings extend seams of the core (`fxdp/wings.py`), which runs without any of them."""
    wrong = [
        f"{name} imports {other}"
        for name, tree in trees()
        for other in ours(tree)
        if room(other) in WINGS and room(name) != room(other)
    ]
    assert wrong == []


def test_only_its_wing_imports_the_semantics_of_python() -> None:
    """`fxdp/capture/python/` extends seams, too; `fxdp/wings.py` names it as text."""
    wing = "capture.python"
    wrong = [
        f"{name} imports {other}"
        for name, tree in trees()
        for other in ours(tree)
        if f"{other}.".startswith(f"{wing}.") and not name.startswith(f"{wing}.")
    ]
    assert wrong == []


def test_what_plans_and_rewrites_knows_no_rank() -> None:
    """Passes, the oracle and placing take the pure mesh: a plan needs no process group."""
    alone = ("ir", "rules", "placing", "passes", "oracle", "reports")
    wrong = [
        f"{name} imports {other}"
        for name, tree in trees()
        for other in ours(tree)
        if room(name) in alone and room(other) == "ranks"
    ]
    assert wrong == []


def test_no_file_name_occurs_twice() -> None:
    """But for `__init__.py` and the doors, whose files are named after what they open."""
    seen: dict[str, list[str]] = {}
    for name, _ in trees():
        if room(name) != "cli" and not (ROOT / name.replace(".", "/")).is_dir():
            seen.setdefault(name.rpartition(".")[2], []).append(name)
    assert [names for names in seen.values() if len(names) > 1] == []


def test_every_name_that_is_imported_from_here_exists() -> None:
    """In tests and benchmarks, too: a file that cannot be imported is noticed without running all of them."""
    missing = [
        f"{file.relative_to(ROOT.parent)}: {module}.{name}"
        for place in ("tests", "benchmarks", "examples")  # in the library mypy looks
        for file in sorted((ROOT.parent / place).rglob("*.py"))
        for module, name in _imported_from_here(ast.parse(file.read_text()))
        if not _source(f"{module}.{name}") and not {name, "__getattr__"} & _names_of(module)
    ]
    assert missing == []


def _imported_from_here(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names, and the modules of this repository that they are taken from; a package has modules as names."""
    found: list[tuple[str, str]] = []
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            found += ((module, name) for module, _, name in (a.name.rpartition(".") for a in node.names))
    return ((module, name) for module, name in found if module and _source(module.partition(".")[0]))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All of a file; what they compute, most of the tree, holds no import."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from _statements(child)


@functools.cache
def _source(module: str) -> Path | None:
    """The file of a module of this repository, or a folder that holds modules."""
    path = ROOT.parent.joinpath(*module.split("."))
    return next((f for f in (path / "__init__.py", path.with_suffix(".py"), path) if f.exists()), None)


@functools.cache
def _names_of(module: str) -> frozenset[str]:
    source = _source(module)
    return frozenset(_bound(parsed(source))) if source and source.is_file() else frozenset()


def _bound(node: ast.AST) -> Iterator[str]:
    """What a module binds at its top, also under `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, ast.ImportFrom) and child.names[0].name == "*":
            yield from _names_of(child.module or "")
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _bound(child)


def test_no_class_name_occurs_in_two_rooms() -> None:
    seen: dict[str, set[str]] = {}
    for name, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                seen.setdefault(node.name, set()).add(room(name))
    assert {name: rooms for name, rooms in seen.items() if len(rooms) > 1} == {}


_FILE = re.compile(r"[\w/.-]*\w\.py\b")
_USERS = ("file.py", "model.py", "models.py", "train.py")
"""Files of users, in examples of commands and errors."""


@functools.cache
def prose() -> list[tuple[Path, str]]:
    """Docstrings and comments of the library, and the pages beside it."""
    pages = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *(ROOT.parent / "docs").glob("*.md")]
    said = [(file, "\n".join(_said_in(file))) for file in FILES]
    return [*said, *((page, page.read_text()) for page in pages)]


_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""'
    r"|'''(?:\\.|[^\\])*?'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(#[^\n]*)",
    re.S,
)
"""What `tokenize` says is a comment, at a tenth of its time."""


def _said_in(file: Path) -> Iterator[str]:
    nodes = (n.value for n in nodes_of(parsed(file)) if isinstance(n, ast.Expr))
    yield from (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    yield from (found for found in _STRING_OR_COMMENT.findall(file.read_text()) if found)


def test_every_file_name_in_prose_exists() -> None:
    missing = [
        f"{file.relative_to(ROOT.parent)}: {found}"
        for file, text in prose()
        for found in _FILE.findall(text)
        if found not in _USERS
        if not any(
            (folder / found).exists()
            for folder in (ROOT, *file.parents[: len(file.relative_to(ROOT.parent).parts)])
        )
    ]
    assert missing == []


def test_docstrings_have_one_style() -> None:
    """Sections are underlined; `Raises:` and the like are another style."""
    other = re.compile(r"^\s*(Args|Attributes|Parameters|Raises|Returns|Yields):\s*$|Raises `", re.M)
    assert [f"{file.relative_to(ROOT.parent)}" for file, text in prose() if other.search(text)] == []


def test_the_table_of_rooms_is_what_the_rooms_say() -> None:
    page = (ROOT.parent / "CONTRIBUTING.md").read_text()
    assert contributing(page) == page, "write it anew: python tests/rooms.py"


def test_passes_do_not_import_each_other() -> None:
    for name, tree in trees():
        if name.startswith("passes."):
            assert not {other for other in ours(tree) if other.startswith("passes")}, name


def test_private_torch_is_imported_in_one_room() -> None:
    """What only saves time may build on more of torch: `shortcut_table.py` says with which releases."""
    private = []
    for name, tree in trees():
        if room(name) in ("torch_compat", "startup"):
            continue
        private += [f"{name}: {other}" for other in imported(tree) if other.startswith("torch._")]
        private += [f"{name}: {ast.unparse(node)}" for node in nodes_of(tree) if _is_private_torch(node)]
    assert private == []


def _is_private_torch(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr.startswith("_")
    )


def test_rules_know_no_graph() -> None:
    for name, tree in trees():
        if room(name) == "rules":
            assert not {other for other in imported(tree) if other.startswith("torch.fx")}, name
            graphs = ("ir.graph.graphs", "ir.graph.metadata")
            assert not {other for other in ours(tree) if other in graphs}, name


def test_passes_are_imported_as_fxdp_passes() -> None:
    for name, tree in trees():
        assert not {other for other in imported(tree) if other.split(".")[0] == "passes"}, name


def test_nothing_prints_but_the_command_line() -> None:
    for name, tree in trees():
        calls = [n for n in nodes_of(tree) if isinstance(n, ast.Call)]
        prints = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert not prints or room(name) == "cli", name


def test_the_environment_is_read_in_settings() -> None:
    for name, tree in trees():
        reads = [
            n for n in nodes_of(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
        ]
        assert not reads or room(name) == "settings", name


def test_passes_touch_meta_through_notes() -> None:
    for name, tree in trees():
        if name.startswith("passes."):
            uses = [n for n in nodes_of(tree) if isinstance(n, ast.Attribute) and n.attr == "meta"]
            assert not uses, name


@pytest.mark.parametrize("module", [fxdp, fxdp.passes, fxdp.rules])
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
