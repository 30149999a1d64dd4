"""Each script by `python script.py` and, unedited, by `fxdp run`: every number that it prints, side by side.

    python -m benchmarks.conformance.scripts [script ...] [--ranks 2 3]

A run without names of scripts writes `benchmarks/conformance/scripts.md`. A number is one device's if the
two differ by at most 1e-9, relative; what stands between the numbers must be equal, too. Ranks get as equal
parts of each batch as its size allows: most sizes divide by neither 2 nor 3, and of a last batch of one or
two samples some of three ranks have none.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
EXACT = 1e-9
LIMIT = 300.0
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\bnan\b|\binf\b)")


@dataclass(frozen=True)
class Run:
    """What a run of a script has printed."""

    printed: str
    errors: str
    seconds: float
    code: int | None
    """The exit code; None of a run that was ended after the limit."""


def names() -> list[str]:
    """Return the names of all scripts."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def kind(name: str) -> str:
    """Return the first line of a script's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return text.splitlines()[0].rstrip(".")


def run(name: str, ranks: int = 0) -> Run:
    """Run a script in an empty folder; `ranks` 0: by itself."""
    by = ["-m", "fxdp", "run", "--nproc", str(ranks)] if ranks else []
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, *by, str(FOLDER / f"{name}.py")]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        where = Path(folder, "files")
        where.mkdir()
        start = time.perf_counter()
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, cwd=where, env=environment, start_new_session=True
            )
            code: int | None = None
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Run(out.read_text(), err.read_text(), time.perf_counter() - start, code)


def difference(expected: str, got: str) -> tuple[float, str]:
    """Return the largest relative difference of printed numbers, and the two lines that have it."""
    worst = 0.0, ""
    lines, others = expected.splitlines(), got.splitlines()
    if len(lines) != len(others):
        return float("inf"), f"{len(lines)} lines, on ranks {len(others)}"
    for line, other in zip(lines, others, strict=True):
        if _NUMBER.sub("#", line) != _NUMBER.sub("#", other):
            return float("inf"), f"{line} | {other}"
        for one, two in zip(_NUMBER.findall(line), _NUMBER.findall(other), strict=True):
            a, b = float(one), float(two)
            if a == b or (a != a and b != b):
                continue
            error = abs(a - b) / max(abs(a), abs(b))
            if not error <= worst[0]:
                worst = error, f"{line} | {other}"
    return worst


def told(errors: str) -> str:
    """Return the last error that a run tells, in one line."""
    found = [
        line for line in errors.splitlines() if re.match(r"(\S*: )?[\w.]*(Error|Exception|Exit)\b", line)
    ]
    lines = [line for line in errors.splitlines() if line.strip()]
    return (found or lines or ["no words"])[-1].strip()


def verdict(one: Run, many: Run) -> tuple[str, str]:
    """Return how a run on ranks compares with one device: a word, and details."""
    if many.code is None:
        return "hangs", ""
    if many.code:
        return "refused", told(many.errors)
    error, where = difference(one.printed, many.printed)
    if error <= EXACT * (1 + 1e-6):
        return "exact", ""
    return "wrong", f"{error:.0e}: {where}"


def row(name: str, ranks: Sequence[int]) -> list[str]:
    """Run a script, and return its row of the table."""
    one = run(name)
    if one.code != 0:
        return [name, kind(name), "fails on one device", told(one.errors)]
    cells, seconds, details = [], [f"{one.seconds:.0f}"], ""
    for number in ranks:
        many = run(name, number)
        word, why = verdict(one, many)
        cells.append(word)
        seconds.append(f"{many.seconds:.0f}")
        details = details or why
    return [name, kind(name), "0", *cells, " / ".join(seconds), details.replace("|", "/")[:300]]


def main() -> None:
    """Run the scripts, print each row, and write the table if all were run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance.scripts")
    parser.add_argument("scripts", nargs="*", help="names; all if none is given")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--output", type=Path, help="where the table goes; else only all scripts' is written")
    asked = parser.parse_args()
    heads = ["script", "kind", "edits", *(f"{n} ranks" for n in asked.ranks), "seconds", "which words"]
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    counts: dict[str, int] = {}
    for name in asked.scripts or names():
        found = row(name, asked.ranks)
        table.append(f"| {' | '.join(found)} |")
        print(table[-1], flush=True)
        words = set(found[3:-2]) - {"exact"} if len(found) == len(heads) else {found[2]}
        word = next((w for w in ("wrong", "hangs", "refused") if w in words), min(words, default="exact"))
        counts[word] = counts.get(word, 0) + 1
    total = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    print(total)
    output = asked.output or (None if asked.scripts else FOLDER.parent / "scripts.md")
    if output is not None:
        output.write_text(_page(table, total, asked.ranks))


def _page(table: Sequence[str], total: str, ranks: Sequence[int]) -> str:
    ran = ", ".join(map(str, ranks))
    text = f"""# Training scripts by `fxdp run`

`python -m benchmarks.conformance.scripts`: each script by `python script.py`, and by
`fxdp run --nproc N script.py` on {ran} ranks; torch {torch.__version__}, CPU, float64. Exact: every
printed number (losses, norms of
gradients, metrics, rates, norms of parameters) differs by at most 1e-9, relative. Most batch sizes divide by
neither 2 nor 3; last batches of one or two samples leave ranks without any. Seconds: one device / each number
of ranks, start and compilation included.

**{total}.**

"""
    return text + "\n".join(table) + "\n"


if __name__ == "__main__":
    main()
