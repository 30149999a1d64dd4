"""Of torch's arithmetic on symbolic sizes: what was computed once is not computed again.

A trace asks for the same few sums, products and comparisons of sizes again and again: each fake tensor that
is made compares its strides with its sizes, each layer of a model has the sizes of the layer before. Torch
goes through sympy each time. Inside `quick_sizes` an answer is remembered by the two expressions and their
values in the example; results, guards and graphs are torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode

__all__ = ["quick_sizes"]

_Binary: TypeAlias = Callable[[SymNode, SymNode], SymNode]

_PURE = ("add", "sub", "mul", "floordiv", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "and", "or")
"""Functions of both expressions alone; `mod` asks for the range of a size, which may shrink."""

_PLAIN = (int, bool, float, type(None))
"""Kinds of values in the example that can be keys: that of a nested size is a size itself."""


@contextlib.contextmanager
def quick_sizes() -> Iterator[None]:
    """Inside, what torch computes of sizes is remembered; other threads share it, to the same answers."""
    if "_replacements_version_counter" not in vars(SymNode)["expr"].fget.__code__.co_names:
        yield  # a torch whose sizes are kept in another way
        return
    with contextlib.ExitStack() as stack:
        for name in _PURE:
            if hasattr(SymNode, f"_{name}"):
                _replace(stack, SymNode, f"_{name}", _remembered(getattr(SymNode, f"_{name}")))
        _replace(stack, SymNode, "wrap_int", _constants(SymNode.wrap_int))
        _replace(stack, SymNode, "maybe_as_int", _integers())
        _replace(stack, SymNode, "expr", property(_expression(vars(SymNode)["expr"].fget)))
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, new)


def _remembered(plain: _Binary) -> _Binary:
    known: dict[Any, SymNode] = {}

    def operation(self: SymNode, other: SymNode) -> SymNode:
        # under a tracer an operation is a node of its graph, too; it comes back here without the tracer
        if proxy_tensor.get_proxy_mode() or not isinstance(other, SymNode):
            return plain(self, other)
        if type(self._hint) not in _PLAIN or type(other._hint) not in _PLAIN:
            return plain(self, other)
        key = (*_key(self), *_key(other))
        found = known.get(key)
        if found is None:
            found = known[key] = plain(self, other)
        return _copy(found, self)

    return operation


def _key(size: SymNode) -> tuple[Any, ...]:
    # the type, as `1`, `True` and `1.0` are one key of a dict
    return size.expr, size._hint, size.pytype, size._optimized_summation


def _copy(found: SymNode, like: SymNode) -> SymNode:
    """The same value as an object of its own, which tracers tell apart, in the other's environment."""
    made = object.__new__(SymNode)
    vars(made).update(vars(found))
    made.shape_env = like.shape_env
    return made


def _constants(plain: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    known: dict[int, SymNode] = {}

    def wrap_int(self: SymNode, num: int) -> SymNode:
        if type(num) is not int:
            return plain(self, num)
        found = known.get(num)
        if found is None:
            found = known[num] = plain(self, num)
        return _copy(found, self)

    return wrap_int


def _integers() -> Callable[[SymNode], int | None]:
    known: dict[Any, int | None] = {}

    def maybe_as_int(self: SymNode) -> int | None:
        expr = self.expr
        if expr not in known:
            known[expr] = int(expr) if expr.is_number else None
        return known[expr]

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
