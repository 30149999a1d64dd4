"""How much of fxdp the tests reach, without a tracer: statements of functions, by rooms.

No tracer runs: each block of a function gets a statement of its own when its module is compiled,
`__reached__[17] = 1` for a block whose first statement stands in line 17. `__reached__` is the module's part
of a file that all processes map: ranks write as workers do, killed ones too, and no process reports anything
at its end. A block is what runs in one go, as far as no statement in it raises.

    TESTS_REACHED=80 python -m pytest ...      a table behind the tests, which fail below 80 %

Programs that tests start by themselves are not counted.
"""

from __future__ import annotations

import ast
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_ROOMS = (_ROOT / "fxdp", _ROOT / "passes")
FILE = "TESTS_REACHED_FILE"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_KEPT = ".opt-reached.pyc"


def begin(file: Path) -> None:
    """Count in this process, and in those that it starts, from here on: before fxdp is imported."""
    file.write_bytes(bytes(sum(_lines().values())))
    os.environ[FILE] = str(file)
    go_on()


def go_on() -> None:
    """Count in this process if the one that has started it counts."""
    if file := os.environ.get(FILE):
        with Path(file).open("r+b") as opened:
            sys.meta_path.insert(0, _Finder(memoryview(mmap.mmap(opened.fileno(), 0))))


def table(file: Path) -> tuple[list[str], float]:
    """Rooms with per cents, four to a line, and the per cent of all."""
    seen, at = file.read_bytes(), 0
    rooms: dict[str, list[int]] = {}
    for path, lines in _lines().items():
        found = [(at + line, weight) for line, weight in blocks(ast.parse(path.read_bytes()))]
        reached = sum(weight for place, weight in found if seen[place])
        at += lines
        inside = path.relative_to(_ROOT).parts
        room = inside[1] if inside[0] == "fxdp" and len(inside) > 2 else inside[0]
        for name in (room, ""):
            counts = rooms.setdefault(name, [0, 0])
            counts[0] += reached
            counts[1] += sum(weight for _, weight in found)
    reached, of = rooms.pop("")
    cells = [f"{room:<12}{100 * part / full:4.0f} %" for room, (part, full) in sorted(rooms.items()) if full]
    rows = ["    ".join(cells[first : first + 4]) for first in range(0, len(cells), 4)]
    return [*rows, f"{100 * reached / of:.1f} % of {of} statements in functions"], 100 * reached / of


@cache
def _lines() -> dict[Path, int]:
    """How many bytes of the file each source has: one a line, and one more, as lines begin at 1."""
    sources = sorted(path for room in _ROOMS for path in room.rglob("*.py"))
    return {path: path.read_bytes().count(b"\n") + 2 for path in sources}


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements inside of a statement, but for those of functions and classes in it."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body:
            yield body
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _compound(node: ast.stmt) -> bool:
    return not isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and any(_bodies(node))


def blocks(tree: ast.AST, *, mark: bool = False) -> list[tuple[int, int]]:
    """First line and number of statements of each block of all functions; `mark` gives them their marks."""
    found = []
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    pending: list[list[ast.stmt]] = [node.body for node in functions]
    while pending:
        body = pending.pop()
        marked: list[ast.stmt] = []
        fresh = True
        for statement in body:
            constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if fresh and not constant:  # docstrings and the dots of abstract functions run no code
                found.append((statement.lineno, 0))
                marked += [_mark(statement)] if mark else []
                fresh = False
            if not constant:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            marked.append(statement)
            if _compound(statement):
                pending += _bodies(statement)
                fresh = True
        body[:] = marked
    return found


def _mark(statement: ast.stmt) -> ast.stmt:
    (mark,) = ast.parse(f"__reached__[{statement.lineno}] = 1").body
    for node in ast.walk(mark):
        if isinstance(node, ast.stmt | ast.expr):
            ast.copy_location(node, statement)
    return mark


class _Loader(SourceFileLoader):
    """Compiles a module with marks, and keeps its code beside that without."""

    def __init__(self, name: str, path: str, reached: memoryview) -> None:
        super().__init__(name, path)
        self._reached = reached

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        blocks(tree, mark=True)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimization)  # type: ignore[no-any-return]

    def get_data(self, path: str) -> bytes:
        return super().get_data(path.replace(".pyc", _KEPT))

    def _cache_bytecode(self, source_path: str, cache_path: str, data: bytes) -> None:
        super()._cache_bytecode(source_path, cache_path.replace(".pyc", _KEPT), data)  # type: ignore[misc]

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__reached__"] = self._reached
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, reached: memoryview) -> None:
        self._parts, at = {}, 0
        for path, lines in _lines().items():
            self._parts[str(path)] = reached[at : at + lines]
            at += lines

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "fxdp":
            return None
        spec = PathFinder.find_spec(name, path, target)
        part = self._parts.get(os.path.realpath(spec.origin)) if spec and spec.origin else None
        if spec and spec.origin and part is not None:
            spec.loader = _Loader(name, spec.origin, part)
        return spec
