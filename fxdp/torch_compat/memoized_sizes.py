"""Of torch's arithmetic on symbolic sizes: what was computed once is not computed again.

A trace asks for the same few sums, products and comparisons of sizes again and again: each fake tensor that
is made compares its strides with its sizes, each layer of a model has the sizes of the layer before. Torch
goes through sympy each time. Inside `memoized_sizes` an answer is remembered by the two expressions and their
values in the example; results, guards and graphs are torch's own.

Around each functional tensor, of which a trace makes one per value, torch lays a wrapper, and computes its
numel, strides and bytes for nobody, a node of the graph for each of these sums. They are none here: a size
that the graph does use is found by its expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcut_table import BINARY_SIZES
from fxdp.torch_compat.shortcuts import is_on, shortcut

if TYPE_CHECKING:
    from torch.fx.experimental.sym_node import SymNode

__all__ = ["memoized_sizes"]

_Binary: TypeAlias = "Callable[[SymNode, SymNode], SymNode]"

_NUMBER = "_fxdp_number"

_PLAIN = (int, bool, float, type(None))
"""Kinds of values in the example that can be keys: that of a nested size is a size itself."""


@shortcut("memoized_sizes")
def memoized_sizes() -> Iterator[None]:
    """Inside, what torch computes of sizes is remembered."""
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.sym_node import SymNode

    wrapping, numbers = _Wrapping(), _Numbers()
    patches = [
        *(Patch(SymNode, f"_{name}", partial(_remembered, wrapping, numbers)) for name in BINARY_SIZES),
        Patch(SymNode, "wrap_int", partial(_constants, numbers)),
        Patch(SymNode, "maybe_as_int", lambda _: _integers()),
        Patch(SymNode, "expr", lambda plain: property(_expression(plain.fget))),
    ]
    if is_on("memoized_wrappers"):
        patches.append(Patch(FunctionalTensor, "__new__", wrapping.around))
    with patched(patches):
        yield


class _Wrapping:
    """Whether a wrapper is being made."""

    def __init__(self) -> None:
        self.depth = 0

    def around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The function that makes one."""

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return plain(cls, *args, **kwargs)
            finally:
                self.depth -= 1

        return new


class _Numbers:
    """A number for each value that a size has: expressions, of which keys are made else, are slow to hash."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._mark = object()  # of a number that is ours; it is kept on the size

    def of(self, size: SymNode) -> int:
        """The number of a size, which copies of it have, too."""
        env = size.shape_env
        # an expression changes where one of its symbols is replaced; what knows its number, keeps it
        version = None if env is None else env._replacements_version_counter
        kept = size.__dict__.get(_NUMBER)
        if kept is not None and kept[0] is self._mark and kept[1] is env and kept[2] == version:
            return kept[3]  # type: ignore[no-any-return]
        # the type, as `1`, `True` and `1.0` are one key of a dict
        value = env, size.expr, size._hint, size.pytype, size._optimized_summation
        number = self._known.setdefault(value, len(self._known))
        if size._hint is not None:  # torch finds a hint when it is first asked for
            size.__dict__[_NUMBER] = self._mark, env, version, number
        return number


def _remembered(wrapping: _Wrapping, numbers: _Numbers, plain: _Binary) -> _Binary:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode

    known: dict[tuple[int, int], SymNode] = {}

    def operation(self: SymNode, other: SymNode) -> SymNode:
        # under a tracer an operation is a node of its graph, too; it comes back here without the tracer
        if not isinstance(other, SymNode) or (not wrapping.depth and get_proxy_mode()):
            return plain(self, other)
        if type(self._hint) not in _PLAIN or type(other._hint) not in _PLAIN:
            return plain(self, other)
        key = numbers.of(self), numbers.of(other)
        found = known.get(key)
        if found is None:
            found = known[key] = plain(self, other)
        numbers.of(found)  # its copies have it
        return _copy(found, self)

    return operation


def _copy(found: SymNode, like: SymNode) -> SymNode:
    """The same value as an object of its own, which tracers tell apart, in the other's environment."""
    made: SymNode = object.__new__(type(found))
    made.__dict__.update(found.__dict__)
    made.shape_env = like.shape_env
    return made


def _constants(
    numbers: _Numbers, plain: Callable[[SymNode, int], SymNode]
) -> Callable[[SymNode, int], SymNode]:
    known: dict[int, SymNode] = {}

    def wrap_int(self: SymNode, num: int) -> SymNode:
        if type(num) is not int:
            return plain(self, num)
        found = known.get(num)
        if found is None:
            found = known[num] = plain(self, num)
        numbers.of(found)
        return _copy(found, self)

    return wrap_int


def _integers() -> Callable[[SymNode], int | None]:
    known: dict[Any, int | None] = {}

    def maybe_as_int(self: SymNode) -> int | None:
        expr = self.expr
        if expr.is_Symbol:  # as are most that are asked
            return None
        try:
            return known[expr]
        except KeyError:
            found = known[expr] = int(expr) if expr.is_number else None
            return found

    return maybe_as_int


def _expression(plain: Callable[[SymNode], Any]) -> Callable[[SymNode], Any]:
    def expr(self: SymNode) -> Any:
        env = self.shape_env
        if env is None:
            return plain(self)
        # torch asks first whether the expression is a number, which walks it: the slowest part by far
        version = env._replacements_version_counter
        if version == 0:
            return self._expr
        known = self._expr_cache
        return known if known is not None and self._expr_ver == version else plain(self)

    return expr
