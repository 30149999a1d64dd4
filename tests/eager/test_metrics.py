"""Metrics of torchmetrics on global tensors, without an edit: update, compute, and forward."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.eager.metrics import ROUNDED, metric_programs
from tests.eager.outcomes import outcome, without_process_group
from tests.eager.running import EXACT, OnRanks, difference, plain
from tests.rank_pool import RankPool

pytest.importorskip("torchmetrics")
PROGRAMS = metric_programs()
SAMPLE = sorted(PROGRAMS)[::9]
"""A cheap part; `python -m benchmarks.conformance.eager_programs` runs all."""
SYNCHRONIZED = ("BinaryStatScores", "MeanSquaredError", "BinaryAUROC", "PearsonCorrCoef")


@pytest.mark.parametrize("name", SAMPLE)
def test_metrics_are_one_devices(name: str) -> None:
    error, where = outcome(PROGRAMS[name], (5, 0, 3))
    assert error <= ROUNDED.get(name, EXACT), where


def _differences(split: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    programs, found = metric_programs(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SYNCHRONIZED:
            expected = without_process_group(programs[name])
            found[name] = difference(expected, plain(programs[name](OnRanks(split))))
    return found


def test_states_of_the_global_batch_are_not_summed_over_ranks(ranks: RankPool) -> None:
    for found in ranks.run(2, _differences, (5, 3)):
        assert {name: where for name, (error, where) in found.items() if error > EXACT} == {}
        assert found.keys() == set(SYNCHRONIZED)
