"""The key of a call: equal for calls that one plan serves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.tensor import GlobalTensor
from fxdp.eager.view_origins import renew

_PLAIN = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Kinds of arguments that stand for themselves; True and 1.0 are equal to 1, and stand with their kind."""


def call_key(op: Any, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return the key of a call, flat and quick to hash; copies of written bases are made anew on the way.

    The op counts by identity: who keeps the key keeps the op, too.
    """
    key: list[Any] = [id(op)]
    _add(key, args)
    if kwargs:
        key.append(dict)
        for name, value in kwargs.items():
            key.append(name)
            _add(key, (value,))
    return tuple(key)


def _add(key: list[Any], values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is GlobalTensor:
            if value._origin is not None:
                renew(value)
            key.append(value._spec)
        elif kind in _PLAIN:
            key.append(value)
        elif kind is bool:  # before `isinstance`, which asks torch's metaclass
            key += kind, value
        elif kind is list or kind is tuple:
            key += list, len(value)
            _add(key, value)
        elif kind is float:  # 0.0 == -0.0, and the plan has the number
            key += kind, value, value == 0.0 and math.copysign(1.0, value)
        elif isinstance(value, Tensor):
            is_strided = value.layout is torch.strided
            key += value.dtype, value.shape, value.stride() if is_strided else value.layout
        elif kind is torch.ScriptObject:  # the weights of a quantized layer, which cannot be compared
            key += kind, id(value)
        else:
            key += kind, value
