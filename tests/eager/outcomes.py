"""Programs of one device on global tensors, on virtual ranks: how far each number is from one device's."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fxdp.ir.types.placements import Shard
from tests.eager.programs import Batch, Program
from tests.eager.running import difference, on_one_device, plain
from tests.eager.virtual import VirtualRanks, on_virtual_ranks, part_of


def parts_on(ranks: VirtualRanks, split: Sequence[int]) -> Batch:
    """What a program takes for its batches on a virtual rank."""
    axis = ranks.axis(split)

    def batch(*tensors: Tensor) -> Any:
        found = tuple(part_of(tensor, axis, Shard(0)) for tensor in tensors)
        return found if len(found) > 1 else found[0]

    return batch


def outcome(run: Program, split: Sequence[int]) -> tuple[float, str]:
    """The largest relative difference of a program's numbers, and where; infinite with the error's text."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            expected = plain(run(on_one_device))
            found = on_virtual_ranks(len(split), lambda ranks: _on_rank(run, ranks, split))
            return max(difference(expected, one) for one in found)
        except Exception:
            return float("inf"), traceback.format_exc(limit=-6)
        finally:
            torch.set_default_dtype(default)


def _on_rank(run: Program, ranks: VirtualRanks, split: Sequence[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    return plain(run(parts_on(ranks, split)))


def without_process_group(run: Program) -> dict[str, Any]:
    """A program's numbers on one device in a process that has a group, as `is_initialized` would say."""
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        return plain(run(on_one_device))
