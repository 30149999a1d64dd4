"""Optimizers, schedulers, clipping, scaling and averages on global losses are those of one device."""

from __future__ import annotations

import pytest

from tests.eager.outcomes import outcome
from tests.eager.running import EXACT
from tests.eager.steps import ROUNDED, step_programs

PROGRAMS = step_programs()


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_are_one_devices(name: str) -> None:
    error, where = outcome(PROGRAMS[name], (5, 0, 3))
    assert error <= ROUNDED.get(name, EXACT), where


def test_each_optimizer_of_torch_steps() -> None:
    assert {"SGD", "AdamW", "LBFGS", "Adafactor", "Rprop", "NAdam"} <= PROGRAMS.keys()
