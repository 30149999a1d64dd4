"""How inputs lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxdp.ir.memory_layout import UNCLEAR, Arrangement, arranged, arrangement, copied

LAST = torch.channels_last

CASES: dict[str, tuple[Tensor, Arrangement]] = {
    "scalar": (torch.ones(()), ()),
    "in_order": (torch.ones(4, 3), (0, 1)),
    "sliced": (torch.ones(4, 9)[1:, ::2], (0, 1)),
    "transposed": (torch.ones(3, 4).t(), (1, 0)),
    "a_part_of_transposed": (torch.ones(5, 8, 3).transpose(0, 1)[2:4], (1, 0, 2)),
    "channels_last": (torch.ones(4, 3, 2, 2).to(memory_format=LAST), (0, 2, 3, 1)),
    "one_channel": (torch.ones(4, 1, 2, 2), (0, 1, 2, 3)),
    "one_channel_last": (torch.ones(4, 1, 2, 2).to(memory_format=LAST), (0, 2, 3, 1)),
    "one_pixel": (torch.ones(4, 3, 1, 1), (0, 1, 2, 3)),
    "one_pixel_channels_last": (torch.ones(4, 3, 1, 1).to(memory_format=LAST), (0, 2, 3, 1)),
    "no_samples": (torch.ones(0, 3, 2, 2).to(memory_format=LAST), (0, 2, 3, 1)),
    "expanded": (torch.ones(4, 1, 3).expand(4, 5, 3), (0, 2)),
    "windows": (torch.ones(4, 9).unfold(1, 3, 1), UNCLEAR),
}


@pytest.mark.parametrize("name", CASES)
def test_orders(name: str) -> None:
    tensor, order = CASES[name]
    assert arrangement(tensor) == order
    assert torch.equal(copied(tensor, order), tensor)
    if order != UNCLEAR:
        assert arrangement(copied(tensor, order)) == order


def test_memory_is_dense() -> None:
    made = arranged((7, 3, 2, 2), (0, 2, 3, 1), torch.float32, torch.device("cpu"))
    assert made.is_contiguous(memory_format=LAST)
    assert arranged((7, 3), UNCLEAR, torch.int64, torch.device("cpu")).stride() == (3, 1)
