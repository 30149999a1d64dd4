"""Faults: what ranks hear when one of them fails, how soon, and whether they name it.

    python -m benchmarks.faults                       # 500 of all faults, drawn by a seed; about half an hour
    python -m benchmarks.faults --count 40 --kinds SIGKILL hang --modes pp --seed 7
    python -m benchmarks.faults --first 50 --count 50 --json 50.json   # in parts, and then one table of all:
    python -m benchmarks.faults --join 0.json 50.json

Each fault is a run of its own, in processes that are forked from one that has imported torch: two or three
ranks train, save, load and evaluate, and something happens to one of them. All others must hear of it (or go
on, where it is none of their business), name that rank and the cause, and end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.fault_kinds import PHASES, TIMEOUT_S, UNHEARD, Verdict, all_faults, judged
from benchmarks.fault_rank import Fault, disturbed, warm
from tests.rank_pool import RankPool

CONSOLE = Console(width=max(Console().width, 120))
_WHOLE_S = 90.0
_UNHEARD_S = 20.0


def main() -> int:
    asked = _arguments()
    if asked.join:
        verdicts = [verdict for file in asked.join for verdict in _read(file)]
        CONSOLE.print(_table(verdicts))
        return _status(verdicts)
    drawn = [
        fault
        for fault in all_faults()
        if fault.mode in asked.modes
        and (not asked.kinds or fault.kind in asked.kinds)
        and (not asked.phases or fault.phase in asked.phases)
    ]
    random.Random(asked.seed).shuffle(drawn)
    drawn = drawn[asked.first : asked.first + asked.count]
    verdicts = []
    pool = RankPool()
    try:
        pool.prepare(warm)
        with tempfile.TemporaryDirectory() as folder:  # Inductor keeps on disk what it compiles here
            pool.spawn(2, disturbed, Fault("nothing", "eval", "inductor", 0), folder, timeout=300)
        for number, fault in enumerate(drawn, asked.first + 1):
            verdict = _verdict(pool, fault)
            verdicts.append(verdict)
            CONSOLE.print(f"{number} {_line(verdict)}", highlight=False, markup=False)
            asked.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    finally:
        pool.close()
        if verdicts:
            CONSOLE.print(_table(verdicts))
    return _status(verdicts)


def _status(verdicts: Sequence[Verdict]) -> int:
    return int(any(v.result not in ("ok", "launcher") for v in verdicts))


def _read(file: Path) -> list[Verdict]:
    return [Verdict(**{**each, "fault": Fault(**each["fault"])}) for each in json.loads(file.read_text())]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="how many of those drawn to leave out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[])
    parser.add_argument("--phases", nargs="+", default=[], choices=[*PHASES, "step"])
    parser.add_argument("--modes", nargs="+", default=["dp", "dp3", "pp", "inductor"])
    parser.add_argument("--json", type=Path, default=Path("faults.json"))
    parser.add_argument("--join", type=Path, nargs="+", help="files of --json, for one table of all")
    return parser.parse_args()


def _verdict(pool: RankPool, fault: Fault) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="fxdp-fault-") as folder:
        begin = time.time()
        own = {"FXDP_TIMEOUT_S": str(TIMEOUT_S if fault.kind == "hang" else 120), "FXDP_CACHE": "0"}
        limit = _UNHEARD_S if fault.phase == "start-up" and fault.kind in UNHEARD else _WHOLE_S
        outcomes = pool.spawn(
            fault.ranks, disturbed, fault, folder, timeout=limit, environment=own, init=True
        )
        return judged(fault, Path(folder), outcomes, begin)


def _line(verdict: Verdict) -> str:
    fault = verdict.fault
    took = "" if verdict.seconds is None else f"{verdict.seconds:5.1f} s"
    text = f"{verdict.result:8} {took:8} {fault.mode:8} rank {fault.victim}  {fault.kind}, {fault.phase}"
    return text if verdict.result == "ok" else f"{text}\n    {verdict.words[:700]}"


def _table(verdicts: Sequence[Verdict]) -> Table:
    shown = Table(title=f"{len(verdicts)} faults, load {os.getloadavg()[1]:.0f}", title_justify="left")
    for column in (
        "",
        "faults",
        "ok",
        "hang",
        "silent",
        "unnamed",
        "launcher",
        "other",
        "news, median s",
        "max s",
    ):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for group in ("mode", "phase", "kind"):
        for name in dict.fromkeys(getattr(v.fault, group) for v in verdicts):
            shown.add_row(*_row(name, [v for v in verdicts if getattr(v.fault, group) == name]))
        shown.add_section()
    shown.add_row(*_row("all", verdicts))
    return shown


def _row(name: str, verdicts: Sequence[Verdict]) -> list[str]:
    results = [v.result for v in verdicts]
    known = ("ok", "hang", "silent", "unnamed", "launcher")
    times = [v.seconds for v in verdicts if v.seconds is not None]
    figures = [f"{median(times):.2f}", f"{max(times):.1f}"] if times else ["", ""]
    other = sum(result not in known for result in results)
    return [name, str(len(verdicts)), *(str(results.count(k)) for k in known), str(other), *figures]


if __name__ == "__main__":
    sys.exit(main())
