"""What loading a sample does beside returning it, as far as code tells: then each rank loads all samples.

    self.seen[i] += 1        read later, by a sampler or a report
    self.log.append(i)
    self.last = i            also in a method or function of the script that `__getitem__` calls
    torch.save(x, path)      files and lines that one device has
    next(self.numbers)       an iterator, or a generator of random numbers, in what the data set reaches: it
                             stands where one device's stands only after all samples
    if y: random.random()    draws for some samples: ranks with others would draw less

Looked at are the data set, what it keeps, and the functions and values that their code names. Of installed
packages code is not read line by line: found are what their methods keep in attributes, iterators, and
generators.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from fxdp.run.script_lines import is_own_file

_GENERATORS = ("Random", "Generator", "RandomState")
_METHODS = ("__getitem__", "__getitems__", "__call__", "forward", "transform")
_PLAIN = (Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType, type(None))
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_WRITES = (
    "print", "save", "savez", "dump", "write", "writelines", "write_text", "write_bytes", "touch", "mkdir",
    "makedirs", "debug", "info", "warning",
)  # fmt: skip
_CHANGES = (
    "append", "appendleft", "extend", "add", "update", "subtract", "insert", "setdefault", "fill", "pop",
    "popleft", "popitem", "remove", "discard", "clear", "sort", "reverse",
)  # fmt: skip
_DRAWS = (
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "random", "randrange",
    "choice", "choices", "sample", "shuffle", "uniform", "normal", "gauss", "permutation", "bernoulli",
    "multinomial", "beta", "exponential", "poisson", "binomial", "standard_normal", "random_sample",
    "normal_", "uniform_", "bernoulli_", "random_", "dropout",
)  # fmt: skip
_MOST_REACHED = 2000
_SOME, _MANY = 8, 64
"""How many elements of a collection are looked at, and how large it may be for all of them."""


def loading_has_effects(dataset: Any) -> bool:
    """Return whether loading from a data set may do more than return a sample."""
    return _Search().finds(dataset)


class _Search:
    """A search through all that loading reaches, each value and function once."""

    def __init__(self) -> None:
        self._seen: dict[Any, Any] = {}

    def finds(self, dataset: Any) -> bool:
        """Return whether anything that is reached has effects; also if too much is reached to tell."""
        waiting = [dataset]
        while waiting:
            value = waiting.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # kept, so that no other value gets its id
            if len(self._seen) > _MOST_REACHED or _goes_on(value):
                return True
            for method, kind in _run_by(value):
                reached = self._reached(method, kind)
                if reached is None:
                    return True
                waiting += reached
            waiting += _kept_by(value)
        return False

    def _reached(self, function: FunctionType, kind: type | None) -> list[Any] | None:
        """Return the values that a function and all that it calls name; None if one has effects."""
        reached, waiting = list[Any](), [function]
        while waiting:
            one = waiting.pop()
            if (one, kind) in self._seen:
                continue
            self._seen[one, kind] = one
            own = is_own_file(one.__code__.co_filename)
            if _has_stores(one) or (own and _changes(one, kind)):
                return None
            named = list(_named_by(one, kind))
            waiting += [f for f in named if isinstance(f, FunctionType) and (own or _is_of(f, one))]
            reached += [v for v in named if not isinstance(v, FunctionType) and (own or _goes_on(v))]
        return reached


def _goes_on(value: Any) -> bool:
    """Return whether a value is a generator of random numbers, or an iterator: each use moves it on."""
    kind = type(value)
    if kind.__name__ in _GENERATORS and kind.__module__.partition(".")[0] in ("random", "numpy", "torch"):
        return True
    return hasattr(kind, "__next__")


def _run_by(value: Any) -> Iterator[tuple[FunctionType, type | None]]:
    """Yield the functions that loading may run of a value, with the class whose methods they call."""
    if isinstance(value, FunctionType):
        yield value, None
    elif isinstance(value, MethodType):
        if isinstance(value.__func__, FunctionType):  # not one in C
            yield value.__func__, type(value.__self__)
    else:
        for name in _METHODS:
            method = inspect.unwrap(getattr(type(value), name, None))  # type: ignore[arg-type]
            if isinstance(method, FunctionType):
                yield method, type(value)


def _kept_by(value: Any) -> list[Any]:
    """Return the values that a value keeps: elements, attributes, bound arguments."""
    if isinstance(value, FunctionType):
        return []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    elements = [getattr(value, "__self__", None)]  # of a bound method, in Python or C
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        inner = list(value.values() if isinstance(value, dict) else value)
        elements += inner if len(inner) <= _MANY else inner[:_SOME]
    return [*elements, *getattr(value, "__dict__", {}).values()]


def _named_by(function: FunctionType, kind: type | None) -> Iterator[Any]:
    """Yield the values of globals, variables around and methods of the same object that a function names."""
    for found in (found for code in _codes(function.__code__) for found in dis.get_instructions(code)):
        if found.opname == "LOAD_GLOBAL":
            yield _unwrapped(function.__globals__.get(found.argval))
        elif found.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            method = _unwrapped(getattr(kind, found.argval, None))
            if isinstance(method, FunctionType):
                yield method
    for cell in function.__closure__ or ():
        try:
            yield _unwrapped(cell.cell_contents)
        except ValueError:  # not bound yet
            continue


def _unwrapped(value: Any) -> Any:
    return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _is_of(function: FunctionType, other: FunctionType) -> bool:
    """Return whether two functions are of one installed package, torch's aside."""
    package = (function.__module__ or "").partition(".")[0]
    return package == (other.__module__ or "").partition(".")[0] and package != "torch"


def _changes(function: FunctionType, kind: type | None) -> bool:
    """Return whether a function of the script changes what outlives the call, writes, or draws."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a lambda within a line: an expression, which stores nothing
        return _KeptValues.names_effects(function.__code__.co_names)
    nodes: Sequence[ast.AST] = list(ast.walk(tree))
    if function.__name__ == "<lambda>":  # the text is that of its line
        nodes = [inner for node in nodes if isinstance(node, ast.Lambda) for inner in ast.walk(node)]
    return any(map(_KeptValues(function, kind, nodes).is_changed_by, nodes))


def _has_stores(function: FunctionType) -> bool:
    """Return whether a function assigns to attributes, globals or variables of a function around it."""
    return any(found.opname in _STORES for found in dis.get_instructions(function.__code__))


class _KeptValues:
    """What outlives a call of a function: attributes of its first argument, globals, and names for these."""

    def __init__(self, function: FunctionType, kind: type | None, nodes: Sequence[ast.AST]) -> None:
        self._globals = function.__globals__
        code = function.__code__
        first = code.co_varnames[0] if kind is not None and code.co_argcount else None
        self._local = {*code.co_varnames, *code.co_cellvars} - {first}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                self._local -= names if self._is_kept(node.value) else set()

    @staticmethod
    def names_effects(names: Iterable[str]) -> bool:
        """Return whether any of the names that an expression uses writes or draws."""
        return not {*_WRITES, *_DRAWS}.isdisjoint(names)

    def is_changed_by(self, node: ast.AST) -> bool:
        """Return whether a node stores into a kept value, calls a method that does, writes, or draws."""
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else [*_flat(node.targets)]
            return any(isinstance(one, ast.Subscript) and self._is_kept(one.value) for one in targets)
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in _WRITES or self._draws(node, node.func.id)
        if not isinstance(node.func, ast.Attribute):
            return False
        name = node.func.attr
        if name in _WRITES or self._draws(node, name):
            return True
        in_place = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        return in_place and self._is_kept(node.func.value)

    def _draws(self, call: ast.Call, name: str) -> bool:
        """Return whether a call draws from a generator that the function has not made itself."""
        if name not in _DRAWS or any(word.arg == "generator" for word in call.keywords):
            return False  # what is passed is found where it is kept
        return name.endswith("_") or _root(call.func) not in self._local

    def _is_kept(self, node: ast.expr) -> bool:
        name = _root(node)
        if name is None or name in self._local:
            return False
        return not isinstance(self._globals.get(name), (ModuleType, type))


def _root(node: ast.expr) -> str | None:
    """Return the variable whose attribute or element a node is, of any depth."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _flat(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _flat(target.elts)
        else:
            yield target
