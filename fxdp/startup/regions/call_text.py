"""Calls of a graph as text: regions with equal text share compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx


def token(node: fx.Node) -> tuple[Any, ...]:
    """Return a key for the operation of a call: target, constants and result type, without operands."""
    constants = fx.map_arg((node.args, node.kwargs), lambda _: "%")
    return node.target, str(constants), value_text(node.meta.get("val"))


def line(node: fx.Node) -> str:
    """Return a call as text with name, result type and operands."""
    return f"{node.name} {node.target} {value_text(node.meta.get('val'))} {node.args} {node.kwargs}"


def value_text(value: Any) -> str:
    """Return the type of a value as text: dtype, sizes, strides and device of a tensor."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {_sizes(value.shape)} {_sizes(value.stride())} {value.device}"
    if isinstance(value, (tuple, list)):
        return str([value_text(v) for v in value])
    return _size(value) if isinstance(value, torch.SymInt) else str(value)


def _sizes(sizes: Iterable[Any]) -> list[Any]:
    return [_size(n) if isinstance(n, torch.SymInt) else n for n in sizes]


def _size(size: torch.SymInt) -> str:
    return _expression(size.node.expr)


@lru_cache(maxsize=65536)
def _expression(expr: sympy.Basic) -> str:
    return str(expr)  # slow, and layers share a few expressions
