"""Represent a number that is read from an input as a tensor, where combined with float64 tensors.

    %u0 = item(%scale)          kept: %scale
    %u1 = 1 - %u0               kept: 1 - %scale
    %y = mul(%x: f64, %u1)      traced as mul(%x, 1 - %scale)

Inductor's kernels on CPU take a number as a C++ `float`, which has only half of the digits of a double.
Combined with tensors of lower precision, a number needs no more digits, and stays a number.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.torch_compat import aten

_READ = aten._local_scalar_dense.default
_ARITHMETIC = frozenset({operator.add, operator.sub, operator.mul, operator.truediv, operator.neg})
_OF_TENSORS = {
    getattr(getattr(aten, name), kind): getattr(aten, name).Tensor
    for name in ("add", "sub", "rsub", "mul", "div")
    for kind in ("Tensor", "Scalar")
}
"""Ops of a tensor and a number, mapped to ops of two tensors."""


class NumberTensors:
    """The tensors behind the numbers of a trace; unused tensors are removed as dead code."""

    def __init__(self) -> None:
        self._kept: dict[fx.Node, Tensor] = {}

    def call(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return the op to call for a node, and its arguments."""
        if len(args) < 2 or node.target not in _OF_TENSORS or not any(map(_is_wide, args[:2])):
            return node.target, args
        kept = [self._kept.get(n) if isinstance(n, fx.Node) else None for n in node.args[:2]]
        if kept == [None, None]:
            return node.target, args
        both = [given if tensor is None else tensor for given, tensor in zip(args, kept, strict=False)]
        return _OF_TENSORS[node.target], (*both, *args[2:])

    def keep(self, node: fx.Node, args: tuple[Any, ...], env: Mapping[fx.Node, Any]) -> None:
        """Record the tensor of a number that is read from a tensor, or computed from a recorded number."""
        if node.target is _READ and _is_wide(args[0]):
            self._kept[node] = args[0]
        elif node.target in _ARITHMETIC and not self._kept.keys().isdisjoint(node.all_input_nodes):
            tensors = fx.map_arg(node.args, lambda n: self._kept.get(n, env[n]))
            self._kept[node] = node.target(*tensors)


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64
