"""What calls of a half do, as text: segments of the same text run the same code."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx


def token(node: fx.Node) -> tuple[Any, ...]:
    """What a call does, whatever it reads."""
    constants = fx.map_arg((node.args, node.kwargs), lambda _: "%")
    return node.target, str(constants), _value_text(node.meta.get("val"))


def line(node: fx.Node) -> str:
    """A call with its name, its result and all that it reads."""
    return f"{node.name} {node.target} {_value_text(node.meta.get('val'))} {node.args} {node.kwargs}"


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device}"
    if isinstance(value, (tuple, list)):
        return str([_value_text(v) for v in value])
    return str(value)
