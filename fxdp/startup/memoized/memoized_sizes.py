"""Cache torch's arithmetic on symbolic sizes.

A trace asks for the same few sums, products and comparisons of sizes again and again: each new fake tensor
compares strides with sizes, and each layer of a model has the sizes of the layer before. Torch evaluates each
by sympy. Inside `memoized_sizes`, results are cached by the two expressions and by the values of both in the
example; results, guards and graphs are equal to torch's own.

Torch wraps each functional tensor, one per traced value, and computes numel, strides and bytes of the wrapper
without any reader; each of these sums becomes a graph node. Here the sums are not recorded: a size that the
graph does use is found by expression.
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
"""Types of example values that can be keys; the value of a nested size is a size, which cannot."""


@shortcut("memoized_sizes")
def memoized_sizes() -> Iterator[None]:
    """Cache the results of torch's arithmetic on sizes inside the block."""
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
    """Flag that is set while a wrapper of a functional tensor is made."""

    def __init__(self) -> None:
        self.depth = 0

    def around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a constructor of wrappers that sets the flag."""

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return plain(cls, *args, **kwargs)
            finally:
                self.depth -= 1

        return new


class _Numbers:
    """Numbers for size values, one per value, used as keys because expressions are slow to hash."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._mark = object()  # marks a number as ours; stored on the size

    def of(self, size: SymNode) -> int:
        """Return the number of a size; copies of the size share the number."""
        env = size.shape_env
        # an expression changes when one of the symbols is replaced; a stored number is then stale
        version = None if env is None else env._replacements_version_counter
        kept = size.__dict__.get(_NUMBER)
        if kept is not None and kept[0] is self._mark and kept[1] is env and kept[2] == version:
            return kept[3]  # type: ignore[no-any-return]
        # the type, as `1`, `True` and `1.0` are one key of a dict
        value = env, size.expr, size._hint, size.pytype, size._optimized_summation
        number = self._known.setdefault(value, len(self._known))
        if size._hint is not None:  # torch computes the hint on first use
            size.__dict__[_NUMBER] = self._mark, env, version, number
        return number


def _remembered(wrapping: _Wrapping, numbers: _Numbers, plain: _Binary) -> _Binary:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode

    known: dict[tuple[int, int], SymNode] = {}

    def operation(self: SymNode, other: SymNode) -> SymNode:
        # under a tracer an operation also records a graph node; it returns here without the tracer
        if not isinstance(other, SymNode) or (not wrapping.depth and get_proxy_mode()):
            return plain(self, other)
        if type(self._hint) not in _PLAIN or type(other._hint) not in _PLAIN:
            return plain(self, other)
        key = numbers.of(self), numbers.of(other)
        found = known.get(key)
        if found is None:
            found = known[key] = plain(self, other)
        numbers.of(found)  # copies share the number
        return _copy(found, self)

    return operation


def _copy(found: SymNode, like: SymNode) -> SymNode:
    """Return a copy of a size in the shape environment of `like`; tracers distinguish the two objects."""
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
        if expr.is_Symbol:  # the usual case
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
        # torch first walks the expression to find whether it is a number, by far the slowest part
        version = env._replacements_version_counter
        if version == 0:
            return self._expr
        known = self._expr_cache
        return known if known is not None and self._expr_ver == version else plain(self)

    return expr
