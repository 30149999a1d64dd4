"""DTensors among the operands of global tensors: parameters that are sharded enter by their full value.

weight (DTensor) --full_tensor--> plain, full, equal on all ranks --> the op
.grad of the weight <-- its part of <-- gradient of the global batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch.distributed.tensor import DTensor

from fxdp.eager.message_report import user_line
from fxdp.errors import InputError

_SEQUENCES = (list, tuple)


def has_sharded(values: Sequence[Any]) -> bool:
    """Return whether a value, or one in a list, is a DTensor."""
    for value in values:
        kind = type(value)
        if kind in _SEQUENCES:
            if has_sharded(value):
                return True
        elif isinstance(value, DTensor):
            return True
    return False


def with_full_values(func: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Return arguments of a function of torch with full values, which have their gradient, for DTensors.

    All ranks must call this together.

    Raises
    ------
    InputError : the function writes into a DTensor.
    """
    if args and writes_first(func) and has_sharded(args[:1]):
        name = getattr(func, "__name__", str(func))
        raise InputError(
            f"{user_line()}: {name} writes a global tensor into a DTensor, which keeps rows of its own; "
            "expected a plain value: take .full() of the global tensor and distribute_tensor() of that"
        )
    return [_full(value) for value in args]


@lru_cache(maxsize=1024)
def writes_first(func: Callable[..., Any]) -> bool:
    """Return whether a function of torch writes its first argument."""
    name = getattr(func, "__name__", str(func))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in _READS)


_READS = frozenset({"__int__", "__index__", "__invert__", "__iter__"})


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if type(value) in _SEQUENCES:
        return type(value)([_full(one) for one in value])
    return value
