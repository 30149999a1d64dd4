"""The figures of `pipeline.py` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from fxdp.reports.rows import format_bytes

TARGET = 0.95
"""Of torch's 1F1B with the same stages, micro-batches and kind of code."""


def baseline(name: str) -> str:
    """Torch's 1F1B of the same kind and number of micro-batches; none for data parallelism."""
    _, schedule, rest = name.split(" ", 2)
    return "" if schedule == "dp" else f"torch 1f1b {rest}"


def ratio(
    name: str, results: dict[str, Any], of: Callable[[list[float]], float] = median, what: str = "seconds"
) -> float | None:
    """The median step (or another figure) as a share of the baseline's."""
    base = results[what].get(baseline(name))
    return of(results[what][name]) / of(base) if base else None


def show(results: dict[str, Any], console: Console) -> None:
    """Print one line per way, then each schedule's bubble and the load of the machine."""
    table = Table(title="{model}, {where}, torch {torch}".format(**results["machine"]), title_justify="left")
    table.add_column("way", no_wrap=True)
    for column in (
        "step, ms",
        "quartiles",
        "x",
        "fastest",
        "x",
        "CPU, ms",
        "x",
        "memory",
        "sent",
        "planned",
        "error",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name in results["seconds"]:
        table.add_row(*_row(name, results))
    table.caption = (
        "x: times torch's 1F1B of the same kind; CPU: of both ranks together, which other programs disturb "
        "less; memory: the worst rank's peak of a step; error: largest relative difference of loss and "
        "gradients to one device"
    )
    console.print(table)
    before, after = results["load"]
    console.print(f"load average {before:.1f} before, {after:.1f} after, {results['machine']['cores']} cores")
    for name, schedule in results["schedules"].items():
        bubble, closed = schedule["bubble"], schedule["closed_form"]
        console.print(f"{name}: bubble {bubble:.4f}, closed form {closed:.4f}", highlight=False)
    for name in results["seconds"]:
        if name.startswith("fxdp") and (found := ratio(name, results)) is not None:
            verdict = "yes" if found <= TARGET else "NO"
            console.print(f"{name} within {TARGET} of torch's 1F1B: {verdict} ({found:.3f})", highlight=False)


def _row(name: str, results: dict[str, Any]) -> list[str]:
    seconds, moved = results["seconds"][name], results["bytes"][name]
    low, middle, high = quantiles(seconds, n=4)
    return [
        name.replace(" micro-batches", ""),
        f"{middle * 1000:.1f}",
        f"{low * 1000:.0f}-{high * 1000:.0f}",
        _share(ratio(name, results)),
        f"{min(seconds) * 1000:.1f}",
        _share(ratio(name, results, of=min)),
        f"{median(results['cpu_seconds'][name]) * 1000:.1f}",
        _share(ratio(name, results, what="cpu_seconds")),
        format_bytes(moved["peak_bytes"]),
        format_bytes(moved["handed_bytes"]),
        format_bytes(moved["planned_bytes"]) if "planned_bytes" in moved else "",
        f"{results['errors'][name]:.0e}",
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of the median steps with quartiles, one panel per number of micro-batches and kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, list[float]]] = {}
    for name, seconds in results["seconds"].items():
        by, schedule, rest = name.split(" ", 2)
        if schedule != "dp":
            groups.setdefault(rest, {})[f"{by} {schedule}"] = seconds
    for rest, found in groups.items():
        for by in ("torch", "fxdp"):
            if seconds := results["seconds"].get(f"{by} dp {rest.split(',')[0]}"):
                found[f"{by} dp"] = seconds
    figure = Figure(figsize=(4 * len(groups), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (rest, found) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        middle = [median(seconds) * 1000 for seconds in found.values()]
        around = [quantiles(seconds, n=4) for seconds in found.values()]
        below = [m - low * 1000 for m, (low, _, _) in zip(middle, around, strict=True)]
        above = [high * 1000 - m for m, (_, _, high) in zip(middle, around, strict=True)]
        colors = ["#1f4e9c" if way.startswith("fxdp") else "#b0b7c3" for way in found]
        axis.bar(list(found), middle, yerr=[below, above], color=colors, capsize=3)
        axis.set_title(rest)
        axis.set_ylabel("median step, ms")
        axis.tick_params(axis="x", rotation=40)
    figure.savefig(path, dpi=120)
