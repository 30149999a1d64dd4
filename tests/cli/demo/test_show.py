"""The picture of two curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxdp.cli.demo.show import draw_curves
from fxdp.cli.demo.training import Curve, TrainingStep


@pytest.mark.parametrize("steps", [1, 5])
def test_a_picture_is_written(tmp_path: Path, steps: int) -> None:
    curve = Curve(tuple(TrainingStep(3.0 - step / 10, 1.0) for step in range(steps)))
    draw_curves(tmp_path / "x.png", ("one", "two"), curve, curve, 1e-9)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
