"""Memory of another process is read in stretches, however many a call copies."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from fxdp.transport.other_memory import OtherMemory, Stretch


def _stretches(source: Tensor, to: Tensor, length: int) -> list[Stretch]:
    """All of a flat value of bytes, from the back to the front."""
    starts = range(0, len(source), length)
    found = [(source[i : i + length], to[i : i + length]) for i in starts]
    return [(a.data_ptr(), b.data_ptr(), len(a)) for a, b in found[::-1]]


@pytest.mark.parametrize("most", [None, 7])
def test_many_stretches(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    count = 5000 if most is None else 200  # more than one call takes, or each call's least
    source = torch.arange(count, dtype=torch.int64).view(torch.uint8)
    to, memory = torch.zeros_like(source), OtherMemory()
    if most is not None:  # the system may copy less than it is asked for, and end within a stretch
        read = memory._read

        def less(process: int, here: object, count: int, there: object, same: int, flags: int) -> int:
            first = here[0]  # type: ignore[index]
            first.size, there[0].size = (min(most, first.size),) * 2  # type: ignore[index]
            return int(read(process, here, 1, there, 1, flags))

        monkeypatch.setattr(memory, "_read", less)
    memory.read(os.getpid(), [(source.data_ptr(), to.data_ptr(), 0), *_stretches(source, to, 13)])
    assert torch.equal(source, to)


def test_what_is_not_there_raises() -> None:
    to = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="Bad address"):
        OtherMemory().read(os.getpid(), [(8, to.data_ptr(), 8)])
