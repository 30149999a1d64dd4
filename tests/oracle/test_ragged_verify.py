"""`fxdp.verify` of a ragged batch: split where samples end, over ranks without any."""

from __future__ import annotations

from typing import Any

import pytest

import fxdp
from tests.eager.data.test_weights import Network
from tests.eager.ragged.test_by_hand import graphs
from tests.pipeline.test_ragged_microbatches import DIMS, ORDER


def _verified(**options: Any) -> fxdp.Report:
    batch = graphs(0, [2, 5, 1, 3, 4])
    args = tuple(batch[key] for key in ORDER)
    return fxdp.verify(Network().double(), args, batch_dims=DIMS, **options)


def test_graphs_are_split_over_ranks() -> None:
    report = _verified(mesh={"dp": 4})
    assert report.ok, report
    assert [list(run.split) for run in report.splits] == [[2, 1, 1, 1], [3, 1, 0, 1], [0, 0, 0, 5]]
    assert report.splits[0].split.further["nodes"] == (7, 1, 3, 4)  # type: ignore[attr-defined]
    given = _verified(mesh={"dp": 3}, splits=[0, 4, 1], strategy="shard")
    assert given.ok, given
    assert list(given.splits[0].split) == [0, 4, 1]


def test_splits_that_leave_out_samples_or_cut_blocks_are_refused() -> None:
    with pytest.raises(fxdp.InputError, match=r"a ragged batch; expected all of its 5 samples"):
        _verified(mesh={"dp": 2}, splits=[3, 1])
    with pytest.raises(fxdp.InputError, match=r"\[3, 2\] cut blocks .*, at the ends of ranks 0"):
        _verified(mesh={"dp": 2}, splits=[3, 2], numerics=fxdp.Bitwise(block=2), backend="eager")


def test_blocks_of_graphs_have_the_bits_of_one_device() -> None:
    report = _verified(mesh={"dp": 3}, numerics=fxdp.Bitwise(block=2), strategy="shard", backend="eager")
    assert report.ok, report
    assert [list(run.split) for run in report.bits] == [[2, 2, 1], [4, 0, 1], [0, 0, 5]]
    assert all(run.nodes > 100 for run in report.bits)
