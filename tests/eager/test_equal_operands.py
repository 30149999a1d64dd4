"""Plain tensors that are not equal on the ranks, and batches that do not belong together, are named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxdp
from fxdp.eager.equal_operands import Comparisons, unequal
from tests.rank_pool import RankPool


def test_uses_are_compared_seldom_in_the_end() -> None:
    schedule = Comparisons()
    due = [call for call in range(1, 100) if schedule.due()]
    assert due == [1, 2, 3, 4, 9, 10, 11, 12, 21, 22, 23, 24, 41, 42, 43, 44, 77, 78, 79, 80]


def test_only_uses_of_all_ranks_are_compared() -> None:
    log = ("a.py:1: add", 5)
    assert unequal([[log, ("a.py:2: mul", 1)], [("a.py:2: mul", 1)]]) is None
    assert unequal([[("l", 1), ("l", 2)], [("l", 1), ("l", 3)], [("l", 1), ("l", 2)]]) == ("l", [1])


def _told(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except fxdp.FxdpError as error:
        return f"{type(error).__name__}: {error}"


def _bad_input() -> dict[str, str]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer, order = nn.Linear(3, 2), torch.randperm(40).view(10, 4)[:, :2].reshape(-1) % 4
    torch.manual_seed(0)
    x = fxdp.global_batch(torch.ones(2, 3))
    apart = torch.full((4, 3), float(rank))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxdp").addHandler(handler)
    other = fxdp.global_batch(torch.ones(1 + 2 * rank, 3))
    found = {
        "noise": _told(lambda: (x + apart).sum().item()),
        "equal": _told(lambda: (x + torch.ones(4, 3)).sum().item()),
        "parameter": _told(lambda: layer(x).sum().item()),
        "order": _told(lambda: x[order].full()),
        "two batches": _told(lambda: (x - other).sum().item()) + "".join(lines),
    }
    x = fxdp.global_batch(torch.ones(2, 3))
    for _ in range(4):
        (x * torch.ones(3)).sum().item()  # the same kind of op at another line
    found["fifth line"] = _told(lambda: (x * torch.full((3,), float(rank))).sum().item())
    mean = x.mean()
    if rank == 0:  # for its log
        found["alone"] = f"{(mean * torch.tensor(3.0)).item():.1f}"
    apart[torch.arange(4)] = x
    found["overwritten"] = _told(lambda: (x + apart).sum().item())
    found["plain"] = _told(lambda: (x + torch.rand(1)).sum().item() > 0)
    logging.getLogger("fxdp").removeHandler(handler)
    found["end"] = _told(lambda: x.full() if rank else fxdp.global_batch(torch.ones(2, 3)))
    return found


def test_what_is_not_equal_is_told_by_line(ranks: RankPool) -> None:
    for found in ranks.run(2, _bad_input):
        for name, shape in {
            "noise": "(4, 3)",
            "parameter": "(2, 3)",
            "order": "(20,)",
            "fifth line": "(3,)",
        }.items():
            assert f"a plain tensor of shape {shape} that has other values on ranks [1]" in found[name], found
            assert "test_equal_operands.py:" in found[name]
        assert (found["equal"], found["plain"], found["overwritten"]) == ("24.0", "True", "24.0")
        assert found.get("alone", "3.0") == "3.0"
        assert "0.0" in found["two batches"]
        assert found["two batches"].count("test_equal_operands.py:") == 3
        assert "(1, 3)" in found["two batches"]
        assert "rank 0 is at a batch at" in found["end"]
        assert "rank 1 is at all_gather of [B, 3] for full() at" in found["end"]
    ranks.renew()
