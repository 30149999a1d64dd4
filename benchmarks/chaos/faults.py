"""Faults: what ranks hear when one of them fails, how soon, and whether they name it.

    python -m benchmarks.chaos.faults  # 500 of all faults, drawn by a seed; half an hour
    python -m benchmarks.chaos.faults --count 40 --kinds SIGKILL hang --modes pp --seed 7
    python -m benchmarks.chaos.faults --first 50 --count 50 --rows 50.jsonl  # in parts, then a table of all:
    python -m benchmarks.chaos.faults --join 0.jsonl 50.jsonl

Each fault is a run of its own: two or three ranks train, save, load and evaluate, and something happens to
one of them. All others must hear of it within five seconds (or go on, where it is none of their business),
name that rank and the cause, and end. Most ranks are forked from a process that has imported torch; those of
one fault in twelve, and of all at start-up, are fresh processes under torchrun. Each verdict is a line of
JSON as soon as it is known; what has one in the file is left out, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.fault_case import Fault
from benchmarks.chaos.fault_kinds import MODES, PHASES, TIMEOUT_S, Ran, Verdict, drawn_faults, judged, seen
from benchmarks.chaos.fault_rank import disturbed_fork, launch, warm
from tests.rank_pool import RankPool

CONSOLE = Console(width=max(Console().width, 175))
_WHOLE_S, _LAUNCHED_S = 40.0, 60.0
_RESULTS = ("ok", "hang", "silent", "unnamed", "wrong rank", "broken", "late", "not injected")


def main() -> int:
    asked = _arguments()
    if asked.join:
        verdicts = [verdict for file in asked.join for verdict in _read(file)]
        CONSOLE.print(_table(verdicts))
        return _status(verdicts)
    chosen = [
        (number, fault)
        for number, fault in enumerate(drawn_faults(asked.seed), 1)
        if fault.mode in asked.modes
        and (not asked.kinds or fault.kind in asked.kinds)
        and (not asked.phases or fault.phase in asked.phases)
        and (asked.launched is None or fault.launched == asked.launched)
    ][asked.first : asked.first + asked.count]
    known = {verdict.number for verdict in _read(asked.rows)}
    _run([(number, fault) for number, fault in chosen if number not in known], asked.rows)
    numbers = {number for number, _ in chosen}
    verdicts = [verdict for verdict in _read(asked.rows) if verdict.number in numbers]
    CONSOLE.print(_table(verdicts))
    return _status(verdicts)


def _run(faults: Sequence[tuple[int, Fault]], rows: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fxdp-faults-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # what is compiled once need not be again
        pool = RankPool()
        try:
            pool.prepare(warm)
            _compile_once(pool, faults)
            for number, fault in faults:
                verdict = _verdict(pool, number, fault)
                CONSOLE.print(_line(verdict), highlight=False, markup=False)
                with rows.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
        finally:
            pool.close()


def _compile_once(pool: RankPool, faults: Sequence[tuple[int, Fault]]) -> None:
    """Let Inductor keep on disk what it makes, for forks and for processes of torchrun."""
    for mode, launched in sorted({(f.mode, f.launched) for _, f in faults if f.compiled}):
        with tempfile.TemporaryDirectory() as folder:
            _ran(pool, Fault("nothing", "eval", mode, 0, launched=launched), folder, 300.0)


def _verdict(pool: RankPool, number: int, fault: Fault) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="fxdp-fault-") as folder:
        ran = _ran(pool, fault, folder, _LAUNCHED_S if fault.launched else _WHOLE_S)
        return judged(number, fault, Path(folder), ran)


def _ran(pool: RankPool, fault: Fault, folder: str, limit_s: float) -> Ran:
    begin = time.time()
    own = {"FXDP_TIMEOUT_S": str(TIMEOUT_S if fault.is_waited_for else 120), "FXDP_CACHE": "0"}
    if fault.launched:
        outcomes = pool.spawn(1, launch, fault, folder, timeout=limit_s, environment=own, init=False)
    else:
        ranks = fault.ranks
        outcomes = pool.spawn(ranks, disturbed_fork, fault, folder, timeout=limit_s, environment=own)
    return seen(fault, outcomes, begin)


def _read(file: Path) -> list[Verdict]:
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [Verdict(**{**each, "fault": Fault(**each["fault"])}) for each in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="how many of those drawn to leave out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[])
    parser.add_argument("--phases", nargs="+", default=[], choices=[*PHASES, "step", "any moment"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--launched", action=argparse.BooleanOptionalAction, help="by torchrun, or not")
    parser.add_argument("--rows", type=Path, default=Path("faults.jsonl"), help="what is known, a line each")
    parser.add_argument("--join", type=Path, nargs="+", help="files of --rows, for one table of all")
    return parser.parse_args()


def _status(verdicts: Sequence[Verdict]) -> int:
    return int(any(v.result != "ok" for v in verdicts))


def _line(verdict: Verdict) -> str:
    fault = verdict.fault
    took = "" if verdict.seconds is None else f"{verdict.seconds:5.2f} s"
    by = "torchrun" if fault.launched else ""
    text = f"{verdict.number:4} {verdict.result:10} {took:8} {by:8} {fault.mode:11} rank {fault.victim}  "
    text += f"{fault.kind}, {fault.phase}"
    return text if verdict.result == "ok" else f"{text}\n    {verdict.words[:900]}"


def _table(verdicts: Sequence[Verdict]) -> Table:
    title = f"{len(verdicts)} faults, load {os.getloadavg()[1]:.1f}"
    shown = Table(title=title, title_justify="left")
    for column in ("", "faults", *_RESULTS, "news, median s", "max s", "ended, max s"):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for group in ("mode", "phase", "kind"):
        for name in dict.fromkeys(getattr(v.fault, group) for v in verdicts):
            shown.add_row(*_row(name, [v for v in verdicts if getattr(v.fault, group) == name]))
        shown.add_section()
    shown.add_row(*_row("under torchrun", [v for v in verdicts if v.fault.launched]))
    shown.add_row(*_row("all", verdicts))
    return shown


def _row(name: str, verdicts: Sequence[Verdict]) -> list[str]:
    results = [v.result for v in verdicts]
    times = [v.seconds for v in verdicts if v.seconds is not None]
    ends = [v.ended for v in verdicts if v.ended is not None and v.seconds is not None]
    figures = [f"{median(times):.2f}", f"{max(times):.1f}", f"{max(ends):.1f}"] if times else ["", "", ""]
    return [name, str(len(verdicts)), *(str(results.count(k) or "") for k in _RESULTS), *figures]


if __name__ == "__main__":
    sys.exit(main())
