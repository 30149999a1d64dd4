"""Packing of tensors of any dtype into rows of bytes for transfers, and hashes of bytes as integers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def plain(value: Tensor) -> Tensor:
    """Return a contiguous copy or view of the value, with pending conjugation and negation resolved."""
    return value.resolve_conj().resolve_neg().contiguous()


def as_bytes(value: Tensor) -> Tensor:
    """Return the memory of a plain value as bytes; the stride of a single element may be anything."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


def number_of(content: bytes) -> int:
    """Return a hash of bytes as an integer below 2**62, equal on all ranks for equal bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 2


def packed_size(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
    """Return the total bytes of values of these shapes and dtypes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def pack(values: Sequence[Tensor]) -> Tensor:
    """Pack values of any dtype into one row of bytes."""
    return torch.cat([as_bytes(plain(value)) for value in values])


def unpack(
    packed: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """Unpack the row of bytes made by `pack` into values of these shapes and dtypes."""
    values, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + prod(shape) * dtype.itemsize
        # copied: a view of another dtype needs an aligned start
        values.append(packed[start:end].clone().view(dtype).reshape(tuple(shape)))
        start = end
    return tuple(values)
