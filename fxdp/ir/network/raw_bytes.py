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


_ALIGNMENT = 64  # bytes; memory of CPU tensors begins at multiples of it


def strided_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a value in a row made by `pack_strided`."""
    return _header_size(len(shape)) + prod(shape) * dtype.itemsize


def pack_strided(value: Tensor) -> Tensor:
    """Pack a value into one row of bytes, together with its strides and alignment."""
    resolved = value.resolve_conj().resolve_neg()
    offset = resolved.storage_offset() * resolved.itemsize % _ALIGNMENT // resolved.itemsize
    header = torch.tensor([offset, *resolved.stride()], device=value.device)
    padding = _header_size(value.dim()) - header.nbytes
    between = header.new_zeros(padding, dtype=torch.uint8)
    return torch.cat([as_bytes(header), between, as_bytes(plain(resolved))])


def unpack_strided(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpack the row of bytes made by `pack_strided` into new memory with the strides and alignment."""
    start = _header_size(len(shape))
    offset, *strides = packed[: 8 * (1 + len(shape))].view(torch.int64).tolist()
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.empty(offset + last + 1, dtype=dtype, device=packed.device)
    value = memory.as_strided(tuple(shape), strides, offset)
    # of an expanded dim all elements are one
    once = tuple(slice(None) if stride else slice(1) for stride in strides)
    value[once] = packed[start:].view(dtype).view(tuple(shape))[once]
    return value


def _header_size(dims: int) -> int:
    """Return the bytes of offset and strides, a multiple of 16, so that any dtype may follow."""
    return (8 * (1 + dims) + 15) // 16 * 16
