"""The arguments of one call of an op, with tensors and sizes taken out, so that both can be replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from torch import Tensor

from fxdp.torch_compat import OpOverload

_T = TypeVar("_T")


@cache
def _size_arguments(op: OpOverload) -> frozenset[str]:
    """Return the names of arguments that are SymInts; `str(argument.type)` calls these `int`."""
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\??(?:\[\])? (\w+)", str(op._schema)))


class CallLeaves:
    """A call's arguments as a template.

    Attributes
    ----------
    tensors : every tensor occurrence, in the order of `(args, kwargs)`.
    sizes : every integer that the op's schema declares a SymInt, in the same order.
    """

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.sizes: list[int] = []
        names, of_size = [argument.name for argument in op._schema.arguments], _size_arguments(op)
        self._args = [self._taken(value, names[i] in of_size) for i, value in enumerate(args)]
        self._kwargs = {name: self._taken(value, name in of_size) for name, value in kwargs.items()}

    def filled(
        self,
        tensors: Sequence[Any],
        sizes: Mapping[int, Any],
        kind: Callable[[list[Any]], Any] = tuple,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return `(args, kwargs)` with these tensors, and some sizes replaced, by position in `sizes`."""

        def put(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return kind([put(one) for one in leaf])
            what, value = leaf
            if what == "tensor":
                return tensors[value]
            return sizes.get(value, self.sizes[value]) if what == "size" else value

        return [put(leaf) for leaf in self._args], {name: put(leaf) for name, leaf in self._kwargs.items()}

    def template(self) -> Any:
        """Return what calls have in common that differ in tensors and sizes only, hashable."""

        def put(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return tuple([put(one) for one in leaf])
            what, value = leaf
            return (
                (type(value), repr(value) if type(value) is float else value) if what == "constant" else what
            )

        return put(self._args), tuple((name, put(leaf)) for name, leaf in self._kwargs.items())

    def constant(self, kind: type[_T]) -> _T | None:
        """Return the first argument of this type, or None."""
        values = [*self._args, *self._kwargs.values()]
        return next((v[1] for v in values if type(v) is tuple and isinstance(v[1], kind)), None)

    def _taken(self, value: Any, is_size: bool) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return "tensor", len(self.tensors) - 1
        if isinstance(value, (list, tuple)):
            return [self._taken(one, is_size) for one in value]
        if is_size and type(value) is int:
            self.sizes.append(value)
            return "size", len(self.sizes) - 1
        return "constant", value


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return every tensor occurrence of a call, in the order of `(args, kwargs)`."""
    found: list[Tensor] = []

    def collect(values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                collect(value)

    collect(args)
    if kwargs:
        collect(kwargs.values())
    return found
