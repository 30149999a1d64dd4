"""Draw loss curves to a file, without a display."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def can_draw() -> bool:
    """Return whether matplotlib is installed, as by `fxdp[demo]`."""
    return find_spec("matplotlib") is not None


def differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the difference of each loss from the reference, relative to the reference."""
    return [abs(loss - expected) / abs(expected) for loss, expected in zip(losses, reference, strict=True)]


def draw_curves(
    path: Path,
    names: tuple[str, str],
    reference: Sequence[float],
    losses: Sequence[float],
    title: str,
    floor: float = 1e-9,
) -> None:
    """Write a picture of two runs: both losses above, the relative difference (at least `floor`) below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(losses) + 1)
    marker = "o" if len(losses) == 1 else ""
    above.plot(steps, reference, color="#f0ad4e", linewidth=6, alpha=0.6, label=names[0], marker=marker)
    above.plot(steps, losses, color="#1f4e9c", linewidth=1.5, label=names[1], marker=marker)
    above.set_ylabel("loss")
    above.set_title(title)
    above.legend()
    shown = [max(difference, floor) for difference in differences(losses, reference)]
    below.plot(steps, shown, color="#555555", marker=marker)
    below.set_yscale("log")
    below.set_ylim(bottom=floor / 2)
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
