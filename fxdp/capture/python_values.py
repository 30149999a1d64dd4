"""Python values of a call that are not constants of the program: dynamic scalar inputs, and unread values.

    compiled(x, beta, path)     program(x, tensor(beta)):  beta = tensor.item();  model(x, beta, <unread>)

A number that only enters arithmetic is read from a 0-dim tensor when the program runs, so that torch computes
as with the user's number: a Python float does not promote dtypes. If the code decides on a number (`if beta >
0`, a shape, `int(beta)`), the value cannot be unknown during the trace: `SpecializationError`. The same error
is raised if the code reads a value that is replaced by `_Unread`: every access counts as a read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SYMBOL = re.compile(r"\b(?:zuf|u)\d+\b")


@dataclass(frozen=True, slots=True)
class AttributeNumber:
    """A number that is an attribute of a module."""

    name: str
    owner: dict[str, Any]
    """The attributes of the module."""
    key: str
    value: float


class SpecializationError(Exception):
    """The model's code decides on these Python values, so the program must be specialized to the values."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        super().__init__(", ".join(sorted(self.names)))


def deciding(error: BaseException, symbols: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the numbers whose symbols occur in torch's error; all names if no symbol occurs.

    Torch's error is `Could not guard on data-dependent expression zuf0 >= 0.0`; `symbols` maps symbols to
    names.
    """
    found: set[str] = set()
    seen: BaseException | None = error
    while seen is not None:
        found |= {symbols[symbol] for symbol in _SYMBOL.findall(str(seen)) if symbol in symbols}
        seen = seen.__cause__ or seen.__context__
    return frozenset(found or symbols.values())


def number_tensor(value: float) -> torch.Tensor:
    """Return a tensor that carries a number into a program, exact for floats and 64-bit ints."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def stable_text(value: Any) -> str:
    """Return `repr(value)` without the addresses of objects and with sets in order.

    Objects with only class and address in their `repr` get equal texts if their classes are equal.
    """
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(map(stable_text, value))},)"
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(stable_text, value))})"
    return _ADDRESS.sub("", repr(value))


def unread(name: str, kind: type, touched: list[str]) -> Any:
    """Return a placeholder for a value of class `kind` that should not be read.

    A read appends `name` to `touched` and raises `SpecializationError`.
    """
    return _Unread(name, kind, touched)


def is_unread(value: Any) -> bool:
    """Return whether a value is a placeholder made by `unread`, without reading the value."""
    return type(value) is _Unread


class _Unread:
    __slots__ = ("_kind", "_name", "_touched")

    def __init__(self, name: str, kind: type, touched: list[str]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_touched", touched)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # for isinstance; a value of another class leads to another cache entry
            return object.__getattribute__(self, "_kind")
        return _touch(self)


def _touch(self: _Unread, *_: Any, **__: Any) -> NoReturn:
    name = object.__getattribute__(self, "_name")
    object.__getattribute__(self, "_touched").append(name)  # the code may catch the error and go on
    raise SpecializationError([name])


_ASKED = (
    "abs", "add", "and", "bool", "bytes", "call", "ceil", "complex", "contains", "delitem", "divmod",
    "enter", "eq", "exit", "float", "floor", "floordiv", "format", "fspath", "ge", "getitem", "gt", "hash",
    "index", "int", "invert", "iter", "le", "len", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg",
    "next", "or", "pos", "pow", "radd", "rand", "repr", "reversed", "rfloordiv", "rmatmul", "rmod", "rmul",
    "ror", "round", "rpow", "rshift", "rsub", "rtruediv", "rxor", "setattr", "setitem", "str", "sub",
    "truediv", "trunc", "xor",
)  # fmt: skip
for _asked in _ASKED:  # Python looks for these in the class, not through `__getattribute__`
    setattr(_Unread, f"__{_asked}__", _touch)
