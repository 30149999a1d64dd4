"""The zoo as users train it: two real ranks, the public API, Inductor, uneven batches that change.

    python -m benchmarks.conformance.zoo_public  # all models without a result, smaller ones first
    python -m benchmarks.conformance.zoo_public swin whisper  # some
    python -m benchmarks.conformance.zoo_public --any-size  # both batches by the program of any size: quicker
    python -m benchmarks.conformance.zoo_public --library timm --share 8  # a library's families in turn

`zoo.py` compares every node of a program on virtual ranks, without Inductor; this one compares losses,
gradients and buffers of compiled programs. What Inductor cannot compile counts as failed. Ranks lower one
after the other, and what one has lowered the other finds on the disk, as a second start does; kernels are
built with -O0. Results gather in JSON files; models of the catalogue that are in theirs are left out, and
families of libraries (see `zoo.py --library`) have their turns: those never measured, then the oldest.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.conformance import kept
from benchmarks.conformance.libraries import ranks as library_ranks
from benchmarks.conformance.libraries.entries import LIBRARIES
from tests.rank_pool import RankError, RankPool
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.shared_work import catalogued_error, know_what_models_need

RESULTS = kept.FOLDER / "zoo_public.json"
CONSOLE = Console()
_CASTS = 1e-6
"""What a model's own casts to float32 may cost."""
_MEASURED_WIDE = (6e-7, 1e-9)
"""An error above it is measured without these casts, too; then also without those of integers."""
_REFUSALS = tuple(f"fxdp.errors.{kind}Error: " for kind in ("Capture", "Placement", "Input"))
_RENEWED = 20
"""After as many models ranks are started anew: what they have compiled stays with them."""


def main() -> int:
    """Measure what is missing; 1 if a model failed or is not exact."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names (default: all without a result)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per model")
    parser.add_argument("--any-size", action="store_true", help="no program of the first batch's own sizes")
    parser.add_argument("--pools", type=int, default=1, help="how many models at a time")
    parser.add_argument("--library", choices=LIBRARIES, help="its families, not the catalogue")
    parser.add_argument("--share", type=int, default=8, help="how many of its families")
    asked = parser.parse_args()
    results = _Results(asked.library)
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in asked.models or _missing(results, asked.share):
        names.put(name)
    threads = [
        threading.Thread(target=_work, args=(names, results, asked.timeout, asked.any_size))
        for _ in range(asked.pools)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = results.found.values()
    return int(any("refused" not in row and min(_errors(row), default=1.0) > _CASTS for row in rows))


def _missing(results: _Results, share: int) -> list[str]:
    if results.library:
        return library_ranks.share(results.library, share)
    return [name for name in _smallest_first() if name not in results.found]


def _errors(row: dict[str, Any]) -> list[float]:
    return [row[kind] for kind in ("error", "in_float64") if kind in row]


def _smallest_first() -> list[str]:
    """The catalogue by nodes of the training program, as far as the sweep has counted them."""
    nodes = {name: int(row["nodes"]) for name, row in kept.read("zoo").items() if "nodes" in row}
    return sorted(CATALOGUE, key=lambda name: nodes.get(name, 1_000_000))


class _Results:
    """What is known of each model of the catalogue, or of a library, in memory and in the file."""

    def __init__(self, library: str | None) -> None:
        self.library = library
        self.found = library_ranks.rows(library) if library else _read(RESULTS)
        self._lock = threading.Lock()

    def add(self, name: str, row: dict[str, Any], seconds: float) -> None:
        with self._lock:
            if self.library:
                self.found[name] = {**row, "on": time.strftime("%Y-%m-%d")}
                every = _read(library_ranks.RESULTS) | {self.library: self.found}
                library_ranks.RESULTS.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")
            else:
                self.found[name] = row
                lines = [f" {json.dumps(key)}: {json.dumps(self.found[key])}" for key in sorted(self.found)]
                RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            CONSOLE.print(
                f"{time.strftime('%H:%M')} {name}: {row} ({seconds:.0f} s)", highlight=False, markup=False
            )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _work(names: queue.SimpleQueue[str], results: _Results, timeout: float, any_size: bool) -> None:
    pool, done = RankPool(), 0
    library = results.library
    if library:
        pool.prepare(library_ranks.know_library, library)
        on_rank: Callable[..., Any] = library_ranks.family_error
    else:
        pool.prepare(know_what_models_need)
        on_rank = catalogued_error
    while True:
        try:
            name = names.get_nowait()
        except queue.Empty:
            break
        start = time.monotonic()
        which = (library, name) if library else (name,)
        row = _measured(pool, on_rank, which, timeout, any_size)
        results.add(name, row, time.monotonic() - start)
        done += 1
        if done % _RENEWED == 0:
            pool.renew()
    pool.close()


def _measured(
    pool: RankPool, on_rank: Callable[..., Any], which: tuple[str, ...], timeout: float, any_size: bool
) -> dict[str, Any]:
    """The errors of a model, or why it has none.

    error        with the casts to float32 that the model makes by itself, if eager runs so in float64
    in_float64   with these casts to float64, where there is no error, or a large one
    programs     2: the first batch's own, and that of any size; 1: the latter alone
    """
    row: dict[str, Any] = {}
    try:
        for wide, limit in enumerate((*_MEASURED_WIDE, math.inf)):
            options = {"any_size": any_size, "wide": wide, "timeout": timeout}
            found = pool.run(2, on_rank, *which, str(pool.folder), **options)
            if None not in found:
                row["in_float64" if wide else "error"] = max(found)
                if max(found) <= limit:
                    break
    except RankError as failure:
        return _words(str(failure))
    return {**row, "programs": 1 if any_size else 2}


def _words(text: str) -> dict[str, Any]:
    """What a rank raised, by whether fxdp refused the model."""
    lines = text.splitlines()
    if refused := [line for line in lines if line.startswith(_REFUSALS)]:
        return {"refused": kept.shortened(refused[0])[:300]}
    raised = [line for line in lines if "Error" in line or "Warning" in line]
    return {"failed": (raised or [text])[-1][-300:]}


if __name__ == "__main__":
    sys.exit(main())
