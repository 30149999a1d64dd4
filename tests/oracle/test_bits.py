"""`fxdp.verify` with `fxdp.Bitwise`: bits of virtual ranks, and the first op that has others, with why."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.ir.ops import sum_tree
from fxdp.oracle import bit_record
from fxdp.oracle.bits import BitRun
from fxdp.runtime import p2p
from tests.drifting import Drifting, drifting_rule, placed  # noqa: F401


class Net(nn.Module):
    """Dropout, a tied weight, a convolution of single pixels, and a count of real targets."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(11, 8), nn.Conv1d(8, 8, 1)
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.conv(self.words(ids)[:, None].transpose(1, 2)).squeeze(2) * self.scale
        return F.cross_entropy(self.head(F.dropout(hidden, 0.2)), target, ignore_index=0)


IDS, TARGETS = torch.arange(7) % 11, torch.tensor([3, 0, 5, 1, 4, 0, 2])


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _verified(model: nn.Module, *batch: Tensor, block: int = 2, **options: Any) -> fxdp.Report:
    return fxdp.verify(model, batch, mesh={"dp": 3}, numerics=fxdp.Bitwise(block=block), **options)


def test_every_cut_has_the_bits_of_one_device() -> None:
    report = _verified(_net(), IDS, TARGETS, strategy="shard")
    assert report.ok, str(report)
    assert [run.split for run in report.bits] == [(4, 2, 1), (6, 0, 1), (0, 0, 7)]
    assert all(run.nodes > 100 and run.results == 2 * 4 + 1 for run in report.bits)  # gradients, steps, loss
    assert "  split [4, 2, 1]: equal bits, " in str(report)
    assert report.as_dict()["bits"][0] | {"nodes": 0} == {
        "split": [4, 2, 1], "ok": True, "nodes": 0, "fault": None, "differing": [],
    }  # fmt: skip


class Images(nn.Module):
    """BatchNorms, which normalize each block by its own statistics, and add up those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last, self.rows = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x))).mean((2, 3))
        return F.cross_entropy(self.rows(self.last(hidden)), y)


def test_blocks_with_statistics_of_their_own_are_compared_by_bits_alone() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 2, 5, 5), torch.randint(0, 3, (8,))
    report = fxdp.verify(
        Images(), batch, mesh={"dp": 3}, numerics={"block": 3}, pipeline={"batch_stats": "microbatch"}
    )
    assert report.ok, str(report)
    assert (report.splits, [run.split for run in report.bits]) == ((), [(3, 3, 2), (6, 0, 2), (0, 0, 8)])
    # the loss; gradients of 8 parameters, and steps; 3 buffers of each norm
    assert report.bits[0].results == 1 + 2 * 8 + 2 * 3
    assert str(report).startswith("Images on mesh(dp=3) has the bits of one device\n  bits alone")


def test_splits_that_cut_a_block() -> None:
    with pytest.raises(fxdp.InputError, match=r"block=2\).* at the ends of ranks 0, 1"):
        _verified(_net(), IDS, TARGETS, splits=[3, 2, 2])


def _first(run: BitRun) -> bit_record.BitFault:
    assert run.fault is not None, "no op differs"
    return run.fault


def _broken(**options: Any) -> BitRun:
    report = _verified(_net(), IDS, TARGETS, **{"splits": [2, 2, 3], **options})
    assert not report.ok
    assert "first op with different bits:" in str(report)
    (run,) = report.bits
    return run


class Placed(nn.Module):
    """Ops that tell where a weight, behind another one, and the input begin in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(1)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(placed(x) * self.scale, placed(self.layer.weight), self.layer.bias).square().mean()


def _misplaced(splits: list[int], **options: Any) -> str:
    torch.manual_seed(0)
    report = fxdp.verify(
        Placed(), (torch.randn(4, 3),), mesh={"dp": 2}, splits=splits, numerics={"block": 1}, tolerance=1e-3,
        precision="own", **options,
    )  # fmt: skip
    fault = _first(report.bits[0])
    assert "where operands begin in memory" in fault.why
    assert "test_bits.py" in fault.location.file
    return fault.text


@pytest.mark.usefixtures("drifting_rule")
def test_gathered_weights_that_begin_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "aligned", lambda value: value)
    assert "%placed_1" in _misplaced([2, 2], strategy="shard")


@pytest.mark.usefixtures("drifting_rule")
def test_inputs_of_a_block_that_begin_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(full: p2p.Microbatch, index: int, start: int, size: int, dims: Any) -> p2p.Microbatch:
        rows = [value[start : start + size] for value in full.inputs]
        return p2p.Microbatch(index, tuple(rows), full.seed)

    monkeypatch.setattr(p2p, "block", block)
    assert "fxdp_tests.placed(%x" in _misplaced([1, 3])


def test_seeds_that_count_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = itertools.count()
    monkeypatch.setattr("fxdp.runtime.stage_calls.part_seed", lambda *parts: next(counted))
    run = _broken()
    assert _first(run).why.startswith("random numbers")
    assert "native_dropout" in _first(run).text
    assert "gradient of conv.weight" in run.differing


def test_a_sum_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_after_another(values: Any, roots: Any, merge: Any) -> Tensor:
        # the sum of few numbers may have equal bits in any order
        found: Tensor = functools.reduce(lambda left, right: merge(left, right, False), values)
        return found if torch.equal(found, found.round()) else found * (1 + 2**-20)

    monkeypatch.setattr(sum_tree, "_merged", one_after_another)
    run = _broken(splits=[4, 2, 1])
    assert _first(run).why.startswith("the order of a sum")
    assert "gradient of conv.weight" in run.differing


@pytest.mark.usefixtures("drifting_rule")
def test_an_op_whose_bits_depend_on_the_batch_is_named() -> None:
    torch.manual_seed(0)
    report = fxdp.verify(
        Drifting(), (torch.randn(6, 3),), mesh={"dp": 2}, numerics={"block": 2}, tolerance=1e-3,
        precision="own",
    )  # fmt: skip
    assert all(run.ok for run in report.splits)  # up to rounding, nothing is wrong
    fault = _first(report.bits[0])
    assert "fxdp_tests.drifting" in fault.text
    assert "not deterministic, or keeps a state" in fault.why
    assert "drifting.py" in fault.location.file
    with pytest.raises(fxdp.ExactnessError, match=r"first op with different bits:\n.*fxdp_tests.drifting"):
        report.raise_if_wrong()
