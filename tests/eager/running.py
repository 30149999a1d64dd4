"""Run programs on plain tensors and on global ones, and compare."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxdp
from tests.eager.programs import PROGRAMS

EXACT = 1e-12


def on_one_device(*tensors: Tensor) -> Any:
    """The full batch, for the reference."""
    return tensors if len(tensors) > 1 else tensors[0]


class OnRanks:
    """This rank's part of each full batch, as global tensors."""

    def __init__(self, split: Sequence[int]) -> None:
        self.split = split

    def __call__(self, *tensors: Tensor) -> Any:
        """Cut the tensors, and let them enter."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        first, total = sum(self.split[:rank]), sum(self.split)
        assert all(len(t) == total for t in tensors)
        parts = tuple(t[first : first + self.split[rank]].clone() for t in tensors)
        found = fxdp.global_batch(parts)
        return found if len(found) > 1 else found[0]


def plain(results: dict[str, Any]) -> dict[str, Any]:
    """The results with full, plain tensors; text stays text."""
    found: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, fxdp.GlobalTensor):
            value = value.full()
        elif not isinstance(value, (str, Tensor)):
            value = torch.tensor(float(value))
        found[name] = value if isinstance(value, str) else value.detach().double()
    return found


def difference(expected: dict[str, Any], got: dict[str, Any]) -> tuple[float, str]:
    """The largest difference, relative to the largest value of each result, and where it is."""
    worst = 0.0, ""
    assert expected.keys() == got.keys(), f"{expected.keys() ^ got.keys()}"
    for name, value in expected.items():
        other = got[name]
        if isinstance(value, str):
            error = 0.0 if value == other else float("inf")
        elif value.shape != other.shape:
            error = float("inf")
        else:
            finite = value[value.isfinite()]
            scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
            apart = torch.where((value == other) | (value.isnan() & other.isnan()), 0.0, value - other)
            error = float(apart.abs().max()) / scale if value.numel() else 0.0
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def errors(split: Sequence[int], names: Iterable[str]) -> dict[str, tuple[float, str]]:
    """Each program's largest difference on these ranks, or its traceback."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, tuple[float, str]] = {}
    for name in names:
        run = PROGRAMS[name]
        torch.manual_seed(0)
        expected = plain(run(on_one_device))
        torch.manual_seed(0)
        try:
            found[name] = difference(expected, plain(run(OnRanks(split))))
        except Exception:
            found[name] = float("inf"), traceback.format_exc(limit=-8)
            break  # the ranks may have parted
    return found
