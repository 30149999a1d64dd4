"""Sharded parameters beside FSDP2 and beside fxdp without sharding: seconds, CPU seconds, memory, traffic.

    python -m benchmarks.speed.sharding            # MLP of 40 small layers and GPT, 2 ranks
    python -m benchmarks.speed.sharding --network  # the same between two hosts of 1 Gbit/s, as root
    python -m benchmarks.speed.sharding --models mlp --rounds 4 --no-first

All variants take turns in one pair of processes, each rank with one thread. `wall` is the fastest step on
the slowest rank, `CPU` the median of CPU seconds of a rank's step, all threads: that is steadier.
`optimizer` is the fastest `optimizer.step()`; below is that on plain tensors of the same rows, and on one
tensor of all elements, which is the least that there can be. `first` is the first step from a cold cache, in
processes of its own, the lower of two. Losses of fxdp are those of the global batch; FSDP2's are each rank's
own, so only fxdp's are compared. Below each table stand the bars that it must reach, with what was seen; the
exit code is 1 if one is missed. Bytes, calls and buckets are counted at torch's ops.
Beside two buckets there may be a tied weight in one of its own: all three are no more than two full ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.models import CASES
from benchmarks.harness.processes import launch
from benchmarks.speed.sharding_rank import BASELINE, BUCKET_MB, FULL, SHARDED, VARIANTS, measure
from fxdp.reports.rows import format_bytes
from tests.hosts.machines import Machines, machines, why_not

CONSOLE = Console(width=max(Console().width, 110))
MLP_BAR, GPT_BAR, WHOLE_BAR, NETWORK_BAR = 0.30, 0.88, 1.10, 0.95
FLAT_BAR, OPTIMIZER_BAR, MANY = 0.7, 1.05, 80  # so many parameters step as one flat tensor


@dataclass(frozen=True)
class Bar:
    """A figure that must not be above its limit."""

    what: str
    seen: float
    limit: float

    @property
    def reached(self) -> bool:
        """Whether it is not."""
        return self.seen <= self.limit


def _bars(name: str, found: dict[str, Any], first: dict[str, Any], network: bool) -> list[Bar]:
    """All that is asked of a sharded model, with what was seen."""
    variants = found["variants"]
    if SHARDED not in variants:
        return []
    own = variants[SHARDED]
    bars = [*_memory_bars(own, found["ranks"]), *_traffic_bars(own)]
    rivals = [v for v in ("fsdp2", BASELINE) if v in variants]
    for rival in rivals if network or name != "mlp" else [v for v in rivals if v == BASELINE]:
        limit = NETWORK_BAR if network else MLP_BAR if name == "mlp" else GPT_BAR
        bars += _speed(own, variants[rival], f"times {rival}", limit)
    if FULL in variants and not network:
        bars += _speed(own, variants[FULL], f"times {FULL}", WHOLE_BAR)
        apart = zip(own["losses"], variants[FULL]["losses"], strict=True)
        bars.append(Bar(f"losses apart from {FULL}", max(abs(a / b - 1) for a, b in apart), 1e-5))
    if found["steps"] and not network:
        sharded, plain, _ = map(min, zip(*found["steps"], strict=True))
        ratio = sharded / plain
        limit = FLAT_BAR if own["tensors"] >= MANY else OPTIMIZER_BAR
        bars.append(Bar("optimizer.step() over plain tensors", ratio, limit))
    if {FULL, SHARDED} <= first.keys():
        bars.append(Bar(f"first step, CPU s over {FULL}", first[SHARDED]["cpu"] / first[FULL]["cpu"], 1.15))
    return bars


def _speed(own: dict[str, Any], other: dict[str, Any], words: str, limit: float) -> list[Bar]:
    return [
        Bar(f"wall, {words}", min(own["wall"]) / min(other["wall"]), limit),
        Bar(f"CPU, {words}", median(own["cpu"]) / median(other["cpu"]), limit),
    ]


def _memory_bars(own: dict[str, Any], ranks: int) -> list[Bar]:
    total = own["parameters"] + own["gradients"] + own["state"]
    share, traffic = 16 * own["numel"] / ranks, own["traffic"]
    return [
        Bar("parameters + gradients + Adam's state over 16 bytes x elements / ranks", total / share, 1.05),
        Bar("gradients over elements / ranks x 4", own["gradients"] / (4 * own["numel"] / ranks), 1.05),
        Bar("gathered bytes at once over the largest bucket's", traffic["bytes"] / traffic["bucket"], 2),
    ]


def _traffic_bars(own: dict[str, Any]) -> list[Bar]:
    traffic = own["traffic"]
    kinds, size = traffic["kinds"], 4 * own["numel"]
    buckets = math.ceil(size / (BUCKET_MB * 2**20))
    apart = abs(traffic["printed"] / traffic["counted"] - 1)
    return [
        Bar("bytes printed apart from counted", apart, 0.01),
        Bar(
            "gathers over parameters, forward and backward",
            kinds.get("all_gather_shards", 0) / (2 * size),
            1.01,
        ),
        Bar("reduce-scatters over parameters", kinds.get("reduce_scatter_shards", 0) / size, 1.01),
        Bar("calls of collectives", traffic["calls"], 3 * buckets + 3),
    ]


def _table(title: str, found: dict[str, Any], first: dict[str, Any]) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for column in ("wall", "x", "CPU", "x", "optimizer", "parameters", "gradients", "state", "first"):
        shown.add_column(column, justify="right", no_wrap=True)
    variants = found["variants"]
    base = variants.get(BASELINE) or next(iter(variants.values()))
    for variant, figures in variants.items():
        wall, cpu = min(figures["wall"]), median(figures["cpu"])
        held = [format_bytes(figures[name]) for name in ("parameters", "gradients", "state")]
        shown.add_row(
            variant, f"{wall * 1e3:.1f} ms", f"{wall / min(base['wall']):.2f}",
            f"{cpu * 1e3:.1f} ms", f"{cpu / median(base['cpu']):.2f}",
            f"{min(figures['optimizer']) * 1e3:.2f} ms", *held,
            f"{first[variant]['wall']:.1f} s" if variant in first else "",
        )  # fmt: skip
    plain = ""
    if found["steps"]:
        took = [f"{min(seconds) * 1e3:.2f} ms" for seconds in zip(*found["steps"], strict=True)]
        plain = "; optimizer.step() on random gradients {}, plain {}, one tensor {}".format(*took)
    most = variants.get(SHARDED, {}).get("traffic", {}).get("bytes", 0)
    buckets = variants.get(SHARDED, {}).get("traffic", {}).get("buckets", 0)
    at_once = f"; {SHARDED} has {format_bytes(most)} of {buckets} buckets gathered at once" if most else ""
    shown.caption = f"x: times {BASELINE}{plain}{at_once}"
    return shown


def _bar_table(bars: list[Bar]) -> Table:
    shown = Table(title="must reach", title_justify="left")
    for column in ("bar", "seen", "at most", ""):
        shown.add_column(column, justify="left" if column == "bar" else "right", no_wrap=True)
    for bar in bars:
        shown.add_row(bar.what, f"{bar.seen:.3g}", f"{bar.limit:g}", "" if bar.reached else "MISSED")
    return shown


@contextlib.contextmanager
def _hosts(asked: argparse.Namespace) -> Iterator[Machines | None]:
    if asked.network is None:
        yield None
        return
    with machines(asked.ranks, mbit=asked.network) as made:
        yield made


def _ask(question: dict[str, Any], asked: argparse.Namespace, made: Machines | None) -> dict[str, Any]:
    """The answer of fresh ranks; empty if they failed."""
    with tempfile.TemporaryDirectory(prefix="fxdp-bench-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.speed.sharding"]
        command.append(json.dumps({**question, "answer": str(answer)}))
        own = {"OMP_NUM_THREADS": "1"}
        if question["what"] == "first":
            own["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "cache")
        if made is not None:
            command = made.of_rank(command)
            own |= {"MASTER_ADDR": made.parent, "LOCAL_WORLD_SIZE": "1"}
        failed = launch(command, asked.ranks, environment=own, timeout=1800)
        return {} if failed or not answer.exists() else json.loads(answer.read_text())


def _compared(name: str, asked: argparse.Namespace, made: Machines | None) -> bool:
    """Measure and show one model; whether all bars were reached."""
    question = {"model": name, "rounds": asked.rounds, "steps": asked.steps}
    found = _ask({**question, "what": "rounds", "variants": asked.variants}, asked, made)
    if not found:
        return False
    timed = [v for v in asked.variants if v.startswith("fxdp")] if asked.first and made is None else []
    # in turns, the lower of both: one alone differs by a tenth from run to run
    cold = {**question, "what": "first"}
    iterations = [{v: _ask({**cold, "variants": [v]}, asked, None) for v in timed} for _ in range(2)]
    if not all(
        figures for iteration in iterations for figures in iteration.values()
    ):  # a bar without a figure is missed
        return False
    first = {
        v: {name: min(iteration[v][name] for iteration in iterations) for name in iterations[0][v]}
        for v in timed
    }
    where = "" if asked.network is None else f", {asked.ranks} hosts, {asked.network:g} Mbit/s"
    CONSOLE.print(_table(f"{name}{where}", found, first))
    bars = _bars(name, found, first, made is not None)
    CONSOLE.print(_bar_table(bars))
    return all(bar.reached for bar in bars)


def main() -> int:
    """Measure on fresh ranks; on a rank, be one."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        measure(json.loads(sys.argv[1]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=["mlp", "gpt"])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-first", dest="first", action="store_false", help="no cold first steps")
    parser.add_argument("--network", type=float, nargs="?", const=1000.0, help="Mbit/s between hosts")
    asked = parser.parse_args()
    if asked.network is not None and (reason := why_not()):
        CONSOLE.print(f"no hosts: {reason}")
        return 2
    with _hosts(asked) as made:
        reached = [_compared(name, asked, made) for name in asked.models]
    CONSOLE.print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores", style="dim")
    return int(not all(reached))


if __name__ == "__main__":
    sys.exit(main())
