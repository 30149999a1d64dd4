"""The training loop and how two runs are compared."""

from __future__ import annotations

import math

import pytest
import torch

from fxdp.cli.demo.command import DemoOptions
from fxdp.cli.demo.data import text_batch
from fxdp.cli.demo.training import Curve, TrainingStep, call, make_model, train


def _curve(*losses: float) -> Curve:
    return Curve(tuple(TrainingStep(loss, 1.0) for loss in losses))


def test_the_difference_is_relative_and_the_largest() -> None:
    assert _curve(4.0, 2.5).largest_difference(_curve(4.0, 2.0)) == pytest.approx(0.25)


def test_nan_is_no_agreement() -> None:
    assert _curve(4.0, math.nan).largest_difference(_curve(4.0, 2.0)) == math.inf


def test_the_first_step_does_not_count_for_speed() -> None:
    assert (
        Curve(
            (TrainingStep(1, 60.0), TrainingStep(1, 2.0), TrainingStep(1, 3.0), TrainingStep(1, 4.0))
        ).step_seconds
        == 3.0
    )
    assert Curve((TrainingStep(1, 60.0),)).step_seconds == 60.0


@pytest.mark.parametrize("kind", ["plain", "transformers"])
def test_training_lowers_the_loss(kind: str) -> None:
    options = DemoOptions(model=kind)
    model = make_model(options)
    batches = [text_batch(0, 2, 16)] * 4
    losses = [
        step.loss for step in train(lambda batch: call(options, model, batch), model.parameters(), batches)
    ]
    assert losses == sorted(losses, reverse=True)


def test_each_call_makes_the_same_parameters() -> None:
    first, second = (make_model(DemoOptions()) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (DemoOptions(), 1e-4),
        (DemoOptions(dtype="float64"), 1e-9),
        (DemoOptions(dtype="float64", model="transformers"), 1e-5),
    ],
)
def test_the_tolerance_fits_the_arithmetic(options: DemoOptions, tolerance: float) -> None:
    assert options.tolerance == tolerance
