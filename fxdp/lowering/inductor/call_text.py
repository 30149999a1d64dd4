"""What calls of a half do, as text: segments of the same text run the same code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx


def token(node: fx.Node) -> tuple[Any, ...]:
    """What a call does, whatever it reads."""
    constants = fx.map_arg((node.args, node.kwargs), lambda _: "%")
    return node.target, str(constants), value_text(node.meta.get("val"))


def line(node: fx.Node) -> str:
    """A call with its name, its result and all that it reads."""
    return f"{node.name} {node.target} {value_text(node.meta.get('val'))} {node.args} {node.kwargs}"


def value_text(value: Any) -> str:
    """A value's type: dtype, sizes, strides and device of a tensor."""
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
    return str(expr)  # which is slow, and layers have the same few
