"""Heads of transformers on two ranks: all that Trainer logs, and the parameters, are those of one device.

`benchmarks/conformance/trainer_heads.py` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.head_runs import compared, trained
from tests.rank_pool import RankPool


@pytest.mark.parametrize("head", ["single label", "vit"])
def test_a_head_trains_and_evaluates_as_on_one_device(ranks: RankPool, tmp_path: Path, head: str) -> None:
    (one,) = ranks.run(1, trained, head, str(tmp_path / "one"), torch.float64)
    assert sum("grad_norm" in row for row in one.rows) == 6
    assert sum("eval_loss" in row for row in one.rows) == 2
    options = {"backend": "eager"}
    for run in ranks.run(2, trained, head, str(tmp_path / "two"), torch.float64, options):
        assert max(compared(one, run).largest.values()) < 1e-9
        assert run.problem_type == one.problem_type == "single_label_classification"
