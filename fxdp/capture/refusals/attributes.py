"""Which Python attributes of a model, beside its parameters and buffers, does a forward change?

A buffer that is registered or made in a forward is none yet: it counts as an attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Attributes:
    """The Python attributes of all modules at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._found = {
            name: (type(child).__name__, _own(child)) for name, child in module.named_modules() if _own(child)
        }

    def changed(self, later: Attributes) -> tuple[str, ...]:
        """The attributes that differ at a later moment: `step of blocks.2 (Block)`."""
        return tuple(
            f"{key} of {path or 'the model'} ({kind})"
            for path, (kind, now) in later._found.items()
            for key, value in now.items()
            if not _unchanged(self._found.get(path, ("", {}))[1], key, value)
        )


def own_attributes(module: nn.Module) -> list[str]:
    """The user's attributes: not torch's, nor what is made of a parameter before each forward."""
    parameters = {name.rpartition("_")[0] for name in module._parameters}
    return [name for name in vars(module) if name not in _TORCHS and name not in parameters]


def _own(module: nn.Module) -> dict[str, Any]:
    made = {name: buffer is not None for name, buffer in module._buffers.items()}
    return made | {name: _content(vars(module)[name]) for name in own_attributes(module)}


_TORCHS = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""The last two are lists that `nn.LSTM` and its kin make of their parameters, anew where these changed."""


def _content(value: Any) -> Any:
    """A container by what is in it now, anything else as itself."""
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    return dict(value) if isinstance(value, dict) else value


def _unchanged(before: Mapping[str, Any], key: str, now: Any) -> bool:
    return key in before and _is(before[key], now)


def _is(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_is(old[key], new[key]) for key in old)
    if isinstance(old, (int, float, str, torch.Size)) and type(old) is type(new):
        return bool(old == new)
    return old is new
