"""Each script by `python script.py` and, unedited, by `fxdp run`: every number that it prints, side by side.

    python -m benchmarks.conformance.scripts [script ...] [--ranks 2 3,1 3] [--compiled]

`--ranks 3` shares each batch among three ranks as equally as its size allows, `3,1` gives the first of two
ranks three quarters. `--compiled` compiles modules from the third call of a kind on, by Inductor; without,
these short scripts run op by op. The results are written into `benchmarks/conformance/scripts.md`, where
those of other scripts and other ranks stay. A number is one device's if the two differ by at most 1e-9,
relative; what stands between the numbers must be equal, too. Where a model computes in float32, Inductor
sums in another order, on one device, too: 1e-6 is told as `float32`. Most batch sizes divide by neither 2 nor
3, and of a last batch of one or two samples some of three ranks have none.
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.conformance.scripts._public import PUBLIC

FOLDER = Path(__file__).parent
EXACT = 1e-9
_OF_FLOAT32 = 1e-6
_FLOAT32 = ("accelerate_summaries",)
"""Scripts whose models compute some of it in float32 whatever their dtype: the norms of transformers' T5."""
_COMPILED = ("--compile-from", "3")
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


def run(name: str, ranks: str = "", options: Sequence[str] = ()) -> Run:
    """Run a script in an empty folder, on a number of ranks or by their shares; without: by itself."""
    by = ["-m", "fxdp", "run", "--parts" if "," in ranks else "--nproc", ranks, *options] if ranks else []
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


def verdict(one: Run, many: Run, *, rounds: bool = False) -> tuple[str, str]:
    """Return how a run on ranks compares with one device: a word, and details.

    `rounds`: some of it was computed in float32, in another order than on one device.
    """
    if many.code is None:
        return "hangs", ""
    if many.code:
        return "refused", told(many.errors)
    error, where = difference(one.printed, many.printed)
    if error <= EXACT * (1 + 1e-6):
        return "exact", ""
    word = "float32" if rounds and error <= _OF_FLOAT32 else "wrong"
    return word, f"{error:.0e}: {where}"


Row = dict[str, str]
"""The cells of a script by their column."""


def row(name: str, ranks: Sequence[str], compiled: bool = False) -> Row:
    """Run a script, and return its row of the table."""
    options = _COMPILED if compiled else ()
    one = run(name)
    cells = {"script": name, "kind": kind(name), "edits": "0"}
    if one.code != 0:
        return cells | {"details": f"fails on one device: {told(one.errors)}"}
    seconds = []
    for asked in ranks:
        many = run(name, asked, options)
        cells[_column(asked, compiled)], why = verdict(one, many, rounds=compiled and name in _FLOAT32)
        seconds.append(f"{many.seconds:.0f}")
        cells["details"] = cells.get("details") or why.replace("|", "/")[:300]
    return cells | {"seconds": " / ".join(seconds)}


def _column(ranks: str, compiled: bool) -> str:
    parts = ranks.split(",")
    column = f"{len(parts)} ranks, {':'.join(parts)}" if len(parts) > 1 else f"{ranks} ranks"
    return f"{column}, compiled" if compiled else column


def main() -> None:
    """Run the scripts, print each row, and write it into the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance.scripts")
    parser.add_argument("scripts", nargs="*", help="names; all if none is given")
    parser.add_argument("--ranks", nargs="+", default=["2", "3,1", "3"])
    parser.add_argument("--compiled", action="store_true", help="compile from the third call of a kind on")
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "scripts.md", help="the table's file")
    asked = parser.parse_args()
    for name in asked.scripts or names():
        found = row(name, asked.ranks, asked.compiled)
        print(found, flush=True)
        text = asked.output.read_text() if asked.output.exists() else ""
        rows = {known["script"]: known for known in rows_of(text)}
        rows[name] = rows.get(name, {}) | found
        asked.output.write_text(page([rows[key] for key in sorted(rows)]))


def rows_of(text: str) -> list[Row]:
    """Return the rows of a page's table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    lines = [[cell.strip(" |") for cell in line] for line in lines]
    return [dict(zip(lines[0], line, strict=False)) for line in lines[1:]]


def page(rows: Sequence[Row]) -> str:
    """Return the page of a table."""
    ranks = sorted({column for cells in rows for column in cells if "ranks" in column})
    heads = ["script", "kind", "public", "edits", *ranks, "seconds", "details"]
    rows = [cells | {"public": PUBLIC.get(cells["script"], "")} for cells in rows]
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    table += [f"| {' | '.join(cells.get(head, '') for head in heads)} |" for cells in rows]
    public = [cells for cells in rows if cells["public"]]
    exact = ", ".join(f"{_exact(public, column)} on {column}" for column in ranks)
    counts = {"counts": _counts(rows, ranks), "public": exact, "scripts": len(public)}
    return _HEAD.format(torch=torch.__version__, **counts) + "\n".join(table) + "\n"


def _exact(rows: Sequence[Row], column: str) -> int:
    return sum(cells.get(column) == "exact" for cells in rows)


def _counts(rows: Sequence[Row], ranks: Sequence[str]) -> str:
    """Return how many scripts are exact, wrong, refused, hang, on each number of ranks that was tried."""
    texts = []
    for column in ranks:
        words = Counter(cells[column] for cells in rows if cells.get(column))
        texts.append(f"{column}: {', '.join(f'{number} {word}' for word, number in words.items())}")
    return "; ".join(texts)


_HEAD = """\
# Training scripts by `fxdp run`

`python -m benchmarks.conformance.scripts`: each script by `python script.py`, and by
`fxdp run --nproc N script.py`, without an edit; torch {torch}, CPU, float64. Exact: every printed number
(losses, norms of gradients, metrics, rates, norms of parameters) differs by at most 1e-9, relative. `3:1`
gives the first rank three quarters of each batch; elsewhere parts are as equal as a batch's size allows: most
divide by neither 2 nor 3, and last batches of one or two samples leave ranks without any. An empty cell was
not tried. Scripts are short, and run op by op; `compiled` compiles modules by Inductor from the third call of
a kind on; `float32` there: at most 1e-6, as its norms are in float32 (T5), which Inductor sums in another
order on one device, too. Seconds are of the runs that were made last, start included, on two cores that
others used, too.

**{counts}.**

`public` says for which of the 34 public scripts by which `fxdp run` is judged a script stands: its loop,
losses, metrics, evaluation and saving, in other words, on data that is made up. Of these {scripts} (one
stands twice, with two networks) are exact: **{public}**.

"""


if __name__ == "__main__":
    main()
