"""The output of the demonstration on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fxdp.cli.demo.command import DemoOptions
from fxdp.cli.demo.training import LENGTH, Curve, TrainingStep
from fxdp.reports.rows import format_seconds
from fxdp.reports.sheet import Sheet
from fxdp.reports.tables import communication_table, timings_line

if TYPE_CHECKING:
    from fxdp.reports.plan import Plan

_NO_PICTURE = "no picture: matplotlib is not installed (pip install 'fxdp[demo]')"


def count_ranks(ranks: int) -> str:
    """Return `1 rank` or `2 ranks`."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def announce(console: Console, options: DemoOptions, ranks: int) -> None:
    """Print a description of the two runs."""
    console.print(
        "A GPT with 4 layers learns the text of pydoc_data.topics,\n"
        f"{options.batch} passages of {LENGTH} bytes a step: first on one device,\n"
        f"then with fxdp on {count_ranks(ranks)} ({options.device}, {options.dtype}, {options.backend}).",
        highlight=False,
    )
    if not _can_draw():
        console.print(_NO_PICTURE, style="yellow", markup=False)


def watched(
    console: Console,
    name: str,
    options: DemoOptions,
    steps: Iterable[TrainingStep],
    *,
    first: str = "",
    meets: bool = False,
) -> Curve:
    """Run the steps with a progress bar: loss, tokens per second.

    `first` names the work before step 1; with `meets`, other ranks wait at a barrier for each step.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
        disable=console.quiet,
    )
    title = f"{name:<12}"
    done: list[TrainingStep] = []
    with bar:
        task = bar.add_task(f"{title} {first}" if first else title, total=options.steps, figures="")
        for step in steps:
            if meets:
                dist.barrier()
            done.append(step)
            speed = options.batch * LENGTH / step.seconds
            figures = f"loss {step.loss:.4f}  {speed:,.0f} tokens/s"
            bar.update(task, advance=1, description=title, figures=figures)
    return Curve(tuple(done))


def summarize(
    console: Console, options: DemoOptions, ranks: int, reference: Curve, curve: Curve, plan: Plan
) -> int:
    """Print both runs and the communication, draw the picture, and return 0 if the losses agree."""
    difference = curve.largest_difference(reference)
    console.print(_losses(options, ranks, reference, curve))
    console.print(communication_table(plan.communication))
    first = format_seconds(curve.steps[0].seconds)
    console.print(f"first step: {first} ({timings_line(plan.timings)})", highlight=False, soft_wrap=True)
    if _can_draw():
        names = ("one device, global batch", f"fxdp, {count_ranks(ranks)}, a part each")
        floor = torch.finfo(getattr(torch, options.dtype)).eps / 4
        draw_curves(options.out, names, reference, curve, floor)
        console.print(f"loss curves: {options.out}", highlight=False, soft_wrap=True)
    good = difference <= options.tolerance
    verdict = "the same within rounding" if good else f"NOT the same: more than {options.tolerance:.0e}"
    console.print(
        f"losses in {options.steps} steps differ by {difference:.1e} (relative): {verdict}",
        style="green" if good else "bold red",
        highlight=False,
    )
    return 0 if good else 1


def _losses(options: DemoOptions, ranks: int, reference: Curve, curve: Curve) -> Sheet:
    columns = ("#step", "#one device", f"#{count_ranks(ranks)}", "#difference")
    rows, last = [], len(curve.steps) - 1
    for step in sorted({0, *range(9, last, max(10, last // 6 // 10 * 10)), last}):
        loss, expected = curve.losses[step], reference.losses[step]
        rows.append((str(step + 1), f"{expected:.6f}", f"{loss:.6f}", f"{abs(loss - expected):.1e}"))
    tokens = options.batch * LENGTH
    speeds = (f"{tokens / run.step_seconds:,.0f}" for run in (reference, curve))
    total = ("tokens/s", *speeds, f"{reference.step_seconds / curve.step_seconds:.2f}x")
    return Sheet("losses", columns, tuple(rows), total=total)


def _can_draw() -> bool:
    """Return whether matplotlib is installed, as by `fxdp[demo]`."""
    return find_spec("matplotlib") is not None


def draw_curves(path: Path, names: tuple[str, str], reference: Curve, curve: Curve, floor: float) -> None:
    """Write a picture of two runs: both losses above, the relative difference (at least `floor`) below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # for a file, without a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(curve.steps) + 1)
    marker = "o" if len(steps) == 1 else ""
    wide, thin = ({"marker": marker, "label": name} for name in names)
    above.plot(steps, reference.losses, color="#f0ad4e", linewidth=6, alpha=0.6, **wide)
    above.plot(steps, curve.losses, color="#1f4e9c", linewidth=1.5, **thin)
    above.set_ylabel("loss")
    above.set_title("GPT on pydoc_data.topics")
    above.legend()
    shown = [max(difference, floor) for difference in curve.differences(reference)]
    below.plot(steps, shown, color="#555555", marker=marker)
    below.set_yscale("log")
    below.set_ylim(bottom=floor / 2)
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
