"""When a step computes, waits and sends: a timeline per rank from timestamps, beside what its link predicts.

    python -m benchmarks.speed.overlap                        # GPT between two hosts of 1 Gbit/s, as root
    python -m benchmarks.speed.overlap --models mlp --mbit 100
    python -m benchmarks.speed.overlap --models gpt --mbit 0  # one host, by gloo, without shared memory

    compute   the calling thread at work       wire   gloo has a sum under way
    waiting   it waits for a sum               predicted   each sum from where it started, one after another,
                                                           as long as the measured link says for its bytes

`overlapped` is the part of the wire's time in which the rank computes; `idle` is when it neither computes nor
sends. Small sums are no gloo's: they are part of the waiting. A profiler records each step, so it is longer
than in `network.py`; shown is the fastest. Pictures: `overlap-MODEL.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.harness.models import CASES
from benchmarks.harness.processes import launch
from fxdp.ir.network.link_cost import LinkCost
from tests.hosts.machines import machines, why_not

CONSOLE = Console(width=max(Console().width, 100))
_COLUMNS = ("rank", "step", "compute", "waiting", "wire", "overlapped", "idle", "wire ends", "predicted")
_COLORS = {"compute": "tab:blue", "waiting": "tab:gray", "wire": "tab:orange", "predicted": "tab:green"}
Spans: TypeAlias = "list[tuple[float, float]]"
"""From when to when, ms; in order, and none within another."""


def main() -> int:
    """Measure, print and draw; 2 where no hosts can be made."""
    asked = _arguments()
    if asked.mbit and (reason := why_not()):
        CONSOLE.print(f"no hosts: {reason}")
        return 2
    for model in asked.models:
        found = _measured(model, asked)
        if found is None:
            return 1
        rows = [rows_of(rank) for rank in found]
        title = f"{model}, 2 ranks, " + (f"{asked.mbit:g} Mbit/s" if asked.mbit else "one host, gloo")
        CONSOLE.print(_table(title, found, rows))
        _draw(title, rows, Path(f"overlap-{model}.png"))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=["gpt"])
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each host's link; 0: one host")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=12, help="steps of which the fastest is shown")
    return parser.parse_args()


def _measured(model: str, asked: argparse.Namespace) -> list[dict[str, Any]] | None:
    """What each rank saw."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        question = {"model": model, "backend": asked.backend, "steps": asked.steps, "answers": folder}
        command = [sys.executable, "-m", "benchmarks.speed.overlap_rank", json.dumps(question)]
        own = {"OMP_NUM_THREADS": "1", "FXDP_SHARED_MEMORY": "0"}
        if asked.mbit:
            made = stack.enter_context(machines(2, mbit=asked.mbit))
            command = made.of_rank(command)
            own |= {"MASTER_ADDR": made.parent, "LOCAL_WORLD_SIZE": "1"}
        if launch(command, 2, environment=own, timeout=600):
            return None
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def rows_of(rank: dict[str, Any]) -> dict[str, Spans]:
    """A rank's timeline: what it computed, waited for and sent, and when it would send by the link's cost."""
    waiting = process_mesh(rank["waits"].values())
    halves = process_mesh(rank["halves"])
    return {
        "compute": without(halves, waiting), "waiting": waiting, "wire": process_mesh(rank["wire"]),
        "predicted": predicted(rank),
    }  # fmt: skip


def predicted(rank: dict[str, Any]) -> Spans:
    """Each large sum from where it was started, or the one before it ends, for as long as its bytes cost."""
    if rank["link"] is None:
        return []
    cost, spans, free = LinkCost(*rank["link"]), [], 0.0
    large = [(start, rank["sums"][key]) for key, start in rank["starts"].items() if _by_gloo(rank, key)]
    for start, size in sorted(large):
        begins = max(start, free)
        free = begins + 1e3 * cost.seconds(size)
        spans.append((begins, free))
    return process_mesh(spans)


def _by_gloo(rank: dict[str, Any], key: str) -> bool:
    """Whether a sum is one of gloo's, which are the largest of a step."""
    sizes = sorted(rank["sums"].values(), reverse=True)[: len(rank["wire"])]
    return bool(sizes) and rank["sums"].get(key, -1) >= sizes[-1]


def process_mesh(spans: Iterable[Sequence[float]]) -> Spans:
    """Spans in order, those that meet as one."""
    found: Spans = []
    for start, end in sorted((start, end) for start, end in spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(spans: Spans, holes: Spans) -> Spans:
    """What of spans lies outside of others."""
    found: Spans = []
    for start, end in spans:
        for hole, after in holes:
            if hole < end and after > start:
                found.append((start, max(start, hole)))
                start = max(start, after)
        found.append((start, end))
    return [(start, end) for start, end in found if end > start]


def length(spans: Spans) -> float:
    """The ms of all spans together."""
    return sum(end - start for start, end in spans)


def _table(title: str, found: list[dict[str, Any]], rows: list[dict[str, Spans]]) -> Table:
    caption = "ms from the start; hidden: of the wire's time; predicted: when the wire would be done"
    shown = Table(title=title, title_justify="left", caption=caption)
    for column in _COLUMNS:
        shown.add_column(column, justify="right")
    for number, (rank, of) in enumerate(zip(found, rows, strict=True)):
        wire, alone = length(of["wire"]), length(without(of["wire"], of["compute"]))
        idle = rank["end"] - length(process_mesh([*of["compute"], *of["wire"]]))
        ends = [spans[-1][1] if (spans := of[name]) else 0.0 for name in ("wire", "predicted")]
        cells = [rank["end"], length(of["compute"]), length(of["waiting"]), wire]
        overlapped = f"{1 - alone / wire:.0%}" if wire else ""
        rest = (f"{value:.1f}" for value in (idle, *ends))
        shown.add_row(str(number), *(f"{value:.1f}" for value in cells), overlapped, *rest)
    return shown


def _draw(title: str, rows: list[dict[str, Spans]], path: Path) -> None:
    """A line per rank and kind of work."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 0.6 * sum(map(len, rows)) + 1), layout="constrained")
    names = []
    for rank, of in enumerate(rows):
        for name, spans in of.items():
            bars = [(start, end - start) for start, end in spans]
            axes.broken_barh(bars, (len(names) - 0.35, 0.7), color=_COLORS[name])
            names.append(f"rank {rank} {name}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the start of the forward")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    CONSOLE.print(f"{path}")


if __name__ == "__main__":
    sys.exit(main())
