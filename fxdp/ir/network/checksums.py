"""Checksums of values that ranks compare: unequal values hardly share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.network.raw_bytes import as_bytes, plain

_BLOCK = 4096  # words that are summed into one: the sum runs at the speed of memory
_MIX, _MASK = 0x5851F42D4C957F2D, (1 << 62) - 1


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return 64 bits for each tensor; one transfer for all tensors."""
    if not tensors:
        return []
    with torch.no_grad():
        return [int(n) for n in torch.stack([_checksum(t) for t in tensors]).tolist()]


def mixed(sums: Sequence[int]) -> int:
    """Combine several numbers into one number below 2**62."""
    found = 0
    for value in sums:
        found = (found * _MIX + value) & _MASK
    return found


def _checksum(tensor: Tensor) -> Tensor:
    """Return a sum of 64-bit words, by blocks with different weights; the sum wraps around."""
    data = as_bytes(plain(tensor.detach()))
    # words need an aligned start
    if data.numel() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    blocks = len(words) // _BLOCK
    rest = words[blocks * _BLOCK :]
    # odd weights lose no bit; even weights would shift the highest bits out
    total = (rest * torch.arange(1, 1 + 2 * len(rest), 2, device=rest.device)).sum()
    if blocks:
        sums = words[: blocks * _BLOCK].view(blocks, _BLOCK).sum(1)
        total = total + (sums * torch.arange(3, 3 + 2 * blocks, 2, device=sums.device)).sum()
    return total
