"""Buffers whose values the model's Python code reads: sizes and switches that it keeps in small tensors.

    self.register_buffer("stride", torch.tensor(2))         the graph has the number 2; a call that finds
    ... pad(x, (0, int(self.stride)))                       another value in the buffer is captured anew

Only buffers that no forward writes can be such numbers, and only where a model cannot be captured otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxdp import torch_compat

_LARGEST = 64
"""How many elements such a buffer may have."""


class WrittenError(Exception):
    """A buffer that counted as a number is written by the forward."""


@dataclass(frozen=True, slots=True)
class Number:
    """The contents of a buffer, to be made anew as a constant."""

    values: Any
    dtype: torch.dtype
    device: torch.device


def numbers_of(module: nn.Module, read: Set[str], written: Set[str]) -> dict[str, Number]:
    """The small buffers among those that Python reads; none if the forward writes one of these."""
    found = [(name, module.get_buffer(name)) for name in sorted(read)]
    if not written.isdisjoint(read) or any(b.is_meta or b.numel() > _LARGEST for _, b in found):
        return {}
    return {name: Number(buffer.tolist(), buffer.dtype, buffer.device) for name, buffer in found}


@contextlib.contextmanager
def as_numbers(module: nn.Module, numbers: Mapping[str, Number]) -> Iterator[None]:
    """While a forward is traced, have constants in the place of these buffers: Python may read them.

    Raises
    ------
    WrittenError : the forward writes or assigns one of them.
    """
    if not numbers:
        yield
        return
    swapped = []
    with torch_compat.larger_constants(_LARGEST):
        for name, number in numbers.items():
            path, _, key = name.rpartition(".")
            buffers = module.get_submodule(path)._buffers
            made = torch.tensor(number.values, dtype=number.dtype, device=number.device)
            swapped.append((name, buffers, key, buffers[key], made, made._version))
            buffers[key] = made
        try:
            yield
            for name, buffers, key, _, made, version in swapped:
                if buffers[key] is not made or made._version != version:
                    raise WrittenError(name)
        finally:
            for _, buffers, key, value, _, _ in swapped:
                buffers[key] = value
