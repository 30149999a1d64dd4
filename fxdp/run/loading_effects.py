"""What loading a sample does beside returning it, as far as code tells: then each rank loads all samples.

    self.seen[i] += 1        read later, by a sampler or a report
    self.log.append(i)
    self.last = i            also in a method or function of the script that `__getitem__` calls
    torch.save(x, path)      files and lines that one device has
    torch.Generator()        in the data set, or in what it keeps: it has drawn for each sample
"""

from __future__ import annotations

import ast
import dis
import inspect
import random
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from fxdp.run.script_lines import is_own_file

_GENERATORS = ("Random", "Generator", "RandomState")
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_METHODS = ("__getitem__", "__getitems__", "__call__", "forward", "transform")
_WRITES = (
    "print", "save", "savez", "dump", "write", "writelines", "write_text", "write_bytes", "touch", "mkdir",
    "makedirs", "debug", "info", "warning",
)  # fmt: skip
_CHANGES = (
    "append", "appendleft", "extend", "add", "update", "subtract", "insert", "setdefault", "fill", "pop",
    "popleft", "popitem", "remove", "discard", "clear", "sort", "reverse",
)  # fmt: skip
_DEEP = 3


def loading_has_effects(value: Any, depth: int = _DEEP) -> bool:
    """Return whether loading from a data set may do more than return a sample."""
    kind: Any = type(value)
    if kind.__name__ in _GENERATORS and kind.__module__.partition(".")[0] in ("random", "numpy", "torch"):
        return True
    if isinstance(value, FunctionType):
        return _has_effects(value, None, frozenset())
    for name in _METHODS:
        method = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
        if isinstance(method, FunctionType) and _has_effects(method, kind, frozenset()):
            return True
    if not depth or isinstance(value, (Tensor, str, bytes, int, float, random.Random)):
        return False
    if isinstance(value, (list, tuple)):
        return any(loading_has_effects(one, depth - 1) for one in value[:8])
    return any(loading_has_effects(one, depth - 1) for one in list(getattr(value, "__dict__", {}).values()))


@cache
def _has_effects(function: FunctionType, kind: Hashable, callers: frozenset[FunctionType]) -> bool:
    """Return whether a function, or one of the script's own that it calls, has effects."""
    if any(found.opname in _STORES for found in dis.get_instructions(function.__code__)):
        return True
    if not is_own_file(function.__code__.co_filename) or function in callers:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a lambda within a line: an expression, which stores nothing
        return not set(_WRITES).isdisjoint(function.__code__.co_names)
    nodes = list(ast.walk(tree))
    if function.__name__ == "<lambda>":  # the text is that of its line
        nodes = [inner for node in nodes if isinstance(node, ast.Lambda) for inner in ast.walk(node)]
    kept = _Kept(function, kind, nodes)
    if any(map(kept.is_changed_by, nodes)):
        return True
    called = (kept.called(node) for node in nodes if isinstance(node, ast.Call))
    return any(_has_effects(one, kind, callers | {function}) for one in called if one is not None)


class _Kept:
    """What outlives a call of a function: attributes of its first argument, globals, and names for these."""

    def __init__(self, function: FunctionType, kind: Hashable, nodes: list[ast.AST]) -> None:
        self._globals, self._kind = function.__globals__, kind
        code = function.__code__
        self._first = code.co_varnames[0] if kind is not None and code.co_argcount else None
        self._local = {*code.co_varnames, *code.co_cellvars} - {self._first}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                self._local -= names if self._is_kept(node.value) else set()

    def is_changed_by(self, node: ast.AST) -> bool:
        """Return whether a node stores into a kept value, calls a method that does, or writes."""
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else [*_flat(node.targets)]
            return any(isinstance(one, ast.Subscript) and self._is_kept(one.value) for one in targets)
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in _WRITES
        if not isinstance(node.func, ast.Attribute):
            return False
        name = node.func.attr
        in_place = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        return name in _WRITES or (in_place and self._is_kept(node.func.value))

    def called(self, call: ast.Call) -> FunctionType | None:
        """Return the function of the script, or the method of the same object, that a call runs."""
        found: Any = None
        if isinstance(call.func, ast.Name):
            found = self._globals.get(call.func.id)
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            found = getattr(self._kind, call.func.attr, None) if call.func.value.id == self._first else None
        found = inspect.unwrap(found) if callable(found) else None
        return found if isinstance(found, FunctionType) else None

    def _is_kept(self, node: ast.expr) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self._local:
            return False
        return not isinstance(self._globals.get(node.id), (ModuleType, type))


def _flat(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _flat(target.elts)
        else:
            yield target
