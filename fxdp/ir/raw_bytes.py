"""Tensors of any dtype as rows of bytes, as which they travel between ranks; and a number for bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def plain(value: Tensor) -> Tensor:
    """The value as its memory has it: no strides, no conjugation or sign left to do."""
    return value.resolve_conj().resolve_neg().contiguous()


def as_bytes(value: Tensor) -> Tensor:
    """The memory of a plain value; the one stride of a single element may be anything."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


def number_of(content: bytes) -> int:
    """A hash that ranks tell each other as an integer: below 2**62, equal on all of them for equal bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 2


def packed_size(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
    """The bytes of values of these shapes and dtypes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def pack(values: Sequence[Tensor]) -> Tensor:
    """Values of any dtype as one row of bytes."""
    return torch.cat([as_bytes(plain(value)) for value in values])


def unpack(
    packed: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """The values of `pack`."""
    values, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + prod(shape) * dtype.itemsize
        # a copy of its own: a view of another dtype needs an aligned start
        values.append(packed[start:end].clone().view(dtype).reshape(tuple(shape)))
        start = end
    return tuple(values)
