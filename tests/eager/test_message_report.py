"""Counts of messages by line: the plan of an eager run."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

import fxdp
from fxdp.eager.message_report import COUNTS
from tests.rank_pool import RankPool


def _counted() -> tuple[list[tuple[str, str, str, int, int]], str]:
    COUNTS.clear()
    x = fxdp.global_batch(torch.ones(2 + dist.get_rank(), 3, dtype=torch.float64))
    for _ in range(2):
        x.sum()
    x.median()
    report = fxdp.eager_report()
    rows = [(row.line.rpartition("/")[2], row.op, row.kind, row.calls, row.full) for row in report.rows]
    return rows, str(report)


def test_messages_are_counted_by_line(ranks: RankPool) -> None:
    for rows, text in ranks.run(2, _counted):
        lines = {op: (line.partition(":")[0], kind, calls, full) for line, op, kind, calls, full in rows}
        assert lines["aten.sum.default"] == ("test_message_report.py", "all_reduce", 2, 0)
        assert lines["aten.median.default"] == ("test_message_report.py", "all_gather", 1, 1)
        assert "1 x all_gather, " in text
        assert "1 run in full" in text
        assert "samples: 1.20 of the mean (2 3 on the ranks)" in text
        assert "the others wait up to 17 % of a step; fxdp.data_loader(weights=...)" in text


def test_an_op_without_a_rule_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    op = torch.library.custom_op(
        "fxdptests::doubled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    x = fxdp.global_batch(torch.ones(3, 2))
    with caplog.at_level(logging.WARNING, "fxdp"):
        for _ in range(2):
            assert op(x).sum().item() == 12.0
    assert [r.getMessage() for r in caplog.records if "has no rule" in r.getMessage()].__len__() == 1
    assert "test_message_report.py:" in caplog.text
