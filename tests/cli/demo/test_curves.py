"""The picture of two curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxdp.cli.demo.curves import can_draw, draw_curves


@pytest.mark.parametrize("steps", [1, 5])
def test_a_picture_is_written(tmp_path: Path, steps: int) -> None:
    assert can_draw()
    losses = [3.0 - step / 10 for step in range(steps)]
    draw_curves(tmp_path / "x.png", ("one", "two"), losses, losses, "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
