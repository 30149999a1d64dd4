"""The output of the demonstration on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fxdp.cli.demo.curves import can_draw, draw_curves
from fxdp.cli.demo.options import DemoOptions
from fxdp.cli.demo.training import LENGTH, Curve, TrainingStep, largest_difference
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
    dtype = str(options.dtype).removeprefix("torch.")
    console.print(
        "A GPT with 4 layers learns the text of pydoc_data.topics,\n"
        f"{options.batch} passages of {LENGTH} bytes a step: first on one device,\n"
        f"then with fxdp on {count_ranks(ranks)} ({options.device}, {dtype}, {options.backend}).",
        highlight=False,
    )
    if not can_draw():
        console.print(_NO_PICTURE, style="yellow", markup=False)


def watched(
    console: Console, name: str, options: DemoOptions, steps: Iterable[TrainingStep], first: str = ""
) -> Curve:
    """Run the steps with a progress bar: loss, tokens per second; `first` names the work before step 1."""
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
            done.append(step)
            speed = options.batch * LENGTH / step.seconds
            figures = f"loss {step.loss:.4f}  {speed:,.0f} tokens/s"
            bar.update(task, advance=1, description=title, figures=figures)
    return Curve(tuple(done))


def summarize(
    console: Console, options: DemoOptions, ranks: int, reference: Curve, curve: Curve, plan: Plan
) -> int:
    """Print both runs and the communication, draw the picture, and return 0 if the losses agree."""
    difference = largest_difference(curve, reference)
    console.print(_losses(options, ranks, reference, curve))
    console.print(communication_table(plan.communication))
    first = format_seconds(curve.steps[0].seconds)
    console.print(f"first step: {first} ({timings_line(plan.timings)})", highlight=False, soft_wrap=True)
    if can_draw():
        names = ("one device, global batch", f"fxdp, {count_ranks(ranks)}, a part each")
        title = "GPT on pydoc_data.topics"
        draw_curves(
            options.out, names, reference.losses, curve.losses, title, torch.finfo(options.dtype).eps / 4
        )
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
