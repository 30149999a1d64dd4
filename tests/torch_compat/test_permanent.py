"""What fxdp changes for all threads and for good has a row that says why; all else goes through `Patch`."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import FXDP, ROOT

_FOR_GOOD = frozenset(
    {
        "replace_for_good", "replace_in_modules", "signal", "set_wakeup_fd", "register_lowering",
        "make_fallback", "insert", "append", "extend", "update",
        "setdefault", "pop", "popitem", "remove", "clear",
    }
)  # fmt: skip
"""Functions that change what they are a method of, or a table of torch's or Python's."""
_REPLACE = ("replace_for_good", "replace_in_modules")
_GATE = ("torch_compat/patch.py", "torch_compat/permanent.py")

CHANGES = {
    "capture/patches/silence.py": {"warnings.filters"},
    "run/files/native_calls.py": {"sys.meta_path"},
    "run/rank.py": {"replace_for_good"},
    "run/ranks.py": {"signal.signal"},
    "run/standard_input.py": {"sys.stdin"},
    "run/script.py": {"sys.argv", "sys.modules", "sys.path"},
    "cli/target.py": {"sys.modules", "sys.path"},
    "ranks/hooks.py": {"replace_for_good", "signal.signal", "signal.set_wakeup_fd"},
    "ranks/launcher.py": {"signal.signal"},
    "ranks/liveness/interrupt.py": {"signal.signal"},
    "settings/launch.py": {"os.environ"},
    "torch_compat/distributed.py": {"_world.default_pg", "_world.pg_group_ranks"},
    "torch_compat/dtensor.py": {"replace_for_good"},
    "torch_compat/dtensor_ops.py": {"DTensor._op_dispatcher._custom_op_handlers"},
    "torch_compat/dynamo.py": {"registry._BACKENDS"},
    "torch_compat/one_rank.py": {"replace_in_modules"},
    "torch_compat/inductor.py": {"make_fallback", "register_lowering"},
}
"""All that fxdp changes of what it imports, without `Patch`: with a row of `docs/process.md` each."""


class _Names(ast.NodeVisitor):
    """The names that a file imports, and those that it gives to attributes of what it imports."""

    def __init__(self) -> None:
        self.imported: set[str] = set()
        self.known: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        self.imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        own = (node.module or "").partition(".")[0] == "fxdp"
        kept = [alias for alias in node.names if not own or alias.name in _REPLACE]
        self.imported |= {alias.asname or alias.name for alias in kept}

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._named(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._named(node.target, node.value)

    def _named(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and self.root(value):
            self.known[target.id] = ast.unparse(value)

    def root(self, node: ast.AST) -> bool:
        """Whether an expression is an attribute of what is imported, or that itself."""
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and (node.id in self.imported or node.id in self.known)

    def text(self, node: ast.AST) -> str:
        """What is changed: the owner of an attribute, the table of an entry."""
        while isinstance(node, ast.Subscript):
            node = node.value
        text = ast.unparse(node)
        return self.known.get(text, text)


def _changed(tree: ast.AST) -> Iterator[str]:
    """What a file changes of what it imports: attributes, entries of tables, by functions that do so."""
    names = _Names()
    names.visit(tree)
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and names.root(target):
                yield names.text(target)
        if isinstance(node, ast.Call):
            yield from _called(names, node)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        for target in node.targets:
            yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        yield node.target


def _called(names: _Names, node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and names.root(node.args[0]):
        yield names.text(node.args[0])
    elif isinstance(function, ast.Name) and function.id in _FOR_GOOD and names.root(function):
        yield function.id
    elif isinstance(function, ast.Attribute) and function.attr in _FOR_GOOD and names.root(function.value):
        plain = isinstance(function.value, ast.Name) and function.value.id in names.imported
        yield names.text(function) if plain else names.text(function.value)


@functools.cache
def _found() -> dict[str, set[str]]:
    files = {str(file.relative_to(FXDP)): ast.parse(file.read_text()) for file in sorted(FXDP.rglob("*.py"))}
    found = {name: set(_changed(tree)) for name, tree in files.items() if name not in _GATE}
    return {name: changed for name, changed in found.items() if changed}


def test_what_is_imported_is_changed_through_the_gate() -> None:
    """By `Patch` for one thread, or here for all of them."""
    assert _found() == CHANGES


def test_each_change_has_a_row() -> None:
    text = (ROOT / "docs" / "process.md").read_text()
    _, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert {where.strip("`") for _, where, *_ in rows} == set(CHANGES)
    assert all(len(row) == 6 and all(row) for row in rows)
    assert len({name for name, *_ in rows}) == len(rows)
    calls = [node for file in FXDP.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "replace_for_good"]  # fmt: skip
    replaced = {str(ast.literal_eval(node.args[0])) for node in calls}
    assert replaced <= {name.strip("`") for name, *_ in rows}


def test_no_mocks() -> None:
    wrong = [str(file) for file in FXDP.rglob("*.py") if "mock" in file.read_text().split()]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("import torch\ntorch.rand = 1", ["torch.rand"]),
        ("from torch import nn\nnn.Linear.forward, x = 1, 2", ["nn.Linear.forward"]),
        ("from torch import Tensor\nsetattr(Tensor, name, 1)", ["Tensor"]),
        ("from torch import Tensor\ndel Tensor.data", ["Tensor.data"]),
        ("import torch.a as a\na.table[op] = 1\na.table.pop(op)", ["a.table", "a.table"]),
        ("import torch\ndef f():\n    known: dict = torch.table\n    known[1] = 2", ["torch.table"]),
        ("import signal\nsignal.signal(1, f)", ["signal.signal"]),
        ("import torch\nmade = torch.ones(2)\nmade.grad = None\nself.torch = 1", []),
    ],
)
def test_changes_that_are_seen(text: str, changed: list[str]) -> None:
    assert list(_changed(ast.parse(text))) == changed


def test_what_stays_of_a_training_has_a_row() -> None:
    """In a process of its own: a mesh, a program of Inductor's, sharded parameters, the backend's name."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.torch_compat.left"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(Path(ROOT))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.splitlines())
    lowerings = {name for name in found if name.endswith(("lowerings[]", ".L[]"))}  # one table
    assert lowerings
    assert found - lowerings == {
        "sys.excepthook", "threading.excepthook", "sys.unraisablehook",
        "torch.distributed.tensor.DTensor.data", "DTensor._op_dispatcher._custom_op_handlers[]",
        "torch._dynamo.backends.registry._BACKENDS[]",
    }  # fmt: skip
