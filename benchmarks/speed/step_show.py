"""The figures of `step_time.py` as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table

from benchmarks.speed.variants import BASELINE, FULL
from fxdp.reports.rows import format_bytes

Figures = dict[str, Any]


def table(name: str, figures: dict[str, Figures]) -> Table:
    """One line per variant: medians with quartiles and minima, and each as a ratio to the baseline."""
    shown = Table(title=name, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for column in ("step", "quartiles, ms", "x", "least", "x", "first step", "x", "memory", "sent", "loss"):
        shown.add_column(column, justify="right", no_wrap=True)
    for variant, found in figures.items():
        if variant != FULL:
            shown.add_row(*_row(variant, found, figures))
    shown.caption = f"x: times {_baseline(figures)}; loss: largest relative difference to one device, 5 steps"
    return shown


def _baseline(figures: dict[str, Figures]) -> str:
    return BASELINE if BASELINE in figures else "compile"


def _row(variant: str, found: Figures, figures: dict[str, Figures]) -> list[str]:
    first, seconds = found["first"], found["seconds"]
    if not first or not seconds:
        return [variant, "failed"]
    base = figures.get(_baseline(figures), {"first": None, "seconds": []})
    low, _, high = quantiles(seconds, n=4)
    ratio = f"{median(seconds) / median(base['seconds']):.3f}" if base["seconds"] else ""
    first_ratio = f"{first['first_seconds'] / base['first']['first_seconds']:.2f}" if base["first"] else ""
    return [
        variant,
        f"{median(seconds) * 1000:.1f} ms",
        f"{low * 1000:.1f}-{high * 1000:.1f}",
        ratio,
        f"{min(seconds) * 1000:.1f} ms",
        f"{min(seconds) / min(base['seconds']):.3f}" if base["seconds"] else "",
        f"{first['first_seconds']:.1f} s",
        first_ratio,
        format_bytes(first["peak_bytes"]),
        format_bytes(first["handed_bytes"]),
        loss_difference(found, figures),
    ]


def loss_difference(found: Figures, figures: dict[str, Figures]) -> str:
    """How far the losses are from one device's; empty for variants that train on a part of the batch."""
    full = figures[FULL]["first"]
    if not full or not found["first"]["handed_bytes"]:
        return ""
    pairs = zip(found["first"]["losses"], full["losses"], strict=True)
    return f"{max(abs(loss - expected) / abs(expected) for loss, expected in pairs):.0e}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of the median steps, with quartiles, one group per model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = results["models"]
    figure = Figure(figsize=(4 + 3 * len(models), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for axis, (name, figures) in zip(axes, models.items(), strict=True):
        timed = {variant: found["seconds"] for variant, found in figures.items() if found["seconds"]}
        milliseconds = [median(seconds) * 1000 for seconds in timed.values()]
        quartiles = [quantiles(seconds, n=4) for seconds in timed.values()]
        below = [value - low * 1000 for value, (low, _, _) in zip(milliseconds, quartiles, strict=True)]
        above = [high * 1000 - value for value, (_, _, high) in zip(milliseconds, quartiles, strict=True)]
        colors = ["#1f4e9c" if variant.startswith("fxdp") else "#b0b7c3" for variant in timed]
        axis.bar(list(timed), milliseconds, yerr=[below, above], color=colors, capsize=3)
        axis.set_title(name)
        axis.set_ylabel("median step, ms")
        axis.tick_params(axis="x", rotation=30)
    figure.suptitle("{ranks} ranks, {device}, torch {torch}".format(**results["machine"]))
    figure.savefig(path, dpi=120)
