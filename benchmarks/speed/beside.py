"""A benchmark of this checkout and of another one, in turns: what has become faster, and what slower.

    python -m benchmarks.speed.beside ../before step_time --models gpt --variants ddp fxdp --rounds 4
    python -m benchmarks.speed.beside ../before pipeline --microbatches 4 --rounds 4
    python -m benchmarks.speed.beside ../before pass_speed

Each checkout runs its own script of that name, on its own fxdp, with the words that follow. What the script
times is compared, over all turns: the least of its seconds and their median. What is not fxdp (`ddp`) is the
measure of what a difference means.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run, compare and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("script", help="step_time, pipeline or pass_speed")
    parser.add_argument("--turns", type=int, default=3, help="of each checkout")
    asked, words = parser.parse_known_args()
    checkouts = {"this": HERE, "other": asked.other.resolve()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for iteration in range(asked.turns):
        order = list(checkouts.items())
        for name, checkout in order if iteration % 2 else order[::-1]:
            for figure, seconds in _times(_run(checkout, asked.script, words)):
                found[name].setdefault(figure, []).extend(seconds)
    _show(found, asked)
    return 0


def _run(checkout: Path, script: str, words: list[str]) -> Any:
    """What the checkout's script writes; its pictures are dropped with the folder."""
    with tempfile.TemporaryDirectory(prefix="fxdp-beside-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, *_place(checkout, script), *words, "--json", str(answer)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        ended = subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)
        if not answer.exists():
            raise SystemExit(f"{' '.join(command)}: exit status {ended.returncode}, and no figures")
        return json.loads(answer.read_text())


def _place(checkout: Path, script: str) -> list[str]:
    """Where Python finds a checkout's script; those without suites have files that are no modules."""
    flat = checkout / "benchmarks" / f"{script}.py"
    return [str(flat)] if flat.exists() else ["-m", f"benchmarks.speed.{script}"]


def _times(answer: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[float]]]:
    """Whatever is called seconds, by its place in the answer."""
    named = bool(path) and any(word.endswith("seconds") for word in path)
    if isinstance(answer, (int, float)) and named:
        yield " ".join(path), [float(answer)]
    elif isinstance(answer, list) and named:
        yield " ".join(path), [float(seconds) for seconds in answer]
    elif isinstance(answer, (list, dict)):
        items = answer.items() if isinstance(answer, dict) else enumerate(answer)
        for name, inner in items:
            yield from _times(inner, (*path, str(name)))


def _show(found: dict[str, dict[str, list[float]]], asked: argparse.Namespace) -> None:
    table = Table(title=f"{asked.script}, {asked.turns} turns: seconds, least (median)")
    for column in ("", "this", str(asked.other), "this / other, least", "median"):
        table.add_column(column, justify="right" if column else "left")
    for figure, these in found["this"].items():
        others = found["other"].get(figure)
        if not these or not others:
            continue
        shown = [f"{min(each):.4f} ({median(each):.4f})" for each in (these, others)]
        ratios = [f"{of(these) / of(others):.3f}" for of in (min, median)]
        table.add_row(figure, *shown, *ratios)
    console = Console(width=max(Console().width, 140))
    console.print(table)
    if alone := sorted(found["this"].keys() ^ found["other"].keys()):
        console.print(f"of one checkout only: {', '.join(alone)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
