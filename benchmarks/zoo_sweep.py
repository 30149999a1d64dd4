"""Every model of the catalogue on virtual ranks against one eager device; writes `benchmarks/ZOO.md`.

    python benchmarks/zoo_sweep.py                        # all models and modes, about half an hour
    python benchmarks/zoo_sweep.py swin "visible zoo" --modes train    # some models or kinds
    python benchmarks/zoo_sweep.py --missing              # go on where a sweep was stopped

A model is measured in a process of its own, with a time limit. Results gather in a JSON file, from which the
table is made; models that were not asked for keep their rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from zoo_table import markdown, state

import fxdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.zoo.catalogue import CATALOGUE, KINDS
from tests.zoo.measure import MODES, measure

CONSOLE = Console()
RESULTS = Path(__file__).with_name("zoo.json")
TABLE = Path(__file__).with_name("ZOO.md")


def main() -> int:
    """Sweep, write, and return 1 if a model was captured and is not exact."""
    asked = _arguments()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in _names(asked.models):
        known = found.setdefault(name, {})
        modes = [mode for mode in asked.modes if not (asked.missing and mode in known)]
        if modes:
            known |= _in_own_process(name, modes, asked.timeout)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            CONSOLE.print(f"{name}: " + ", ".join(f"{mode} {state(known[mode])}" for mode in modes))
    rows = {kind: {name: found.get(name, {}) for name in names} for kind, names in KINDS.items()}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fxdp": fxdp.__version__,
    }
    TABLE.write_text(markdown(rows, versions))
    CONSOLE.print(f"wrote {TABLE}")
    wrong = [row for modes in found.values() for row in modes.values() if row.get("failed") == "wrong"]
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names of models or of kinds (default: all)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--timeout", type=int, default=300, help="seconds per model")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    return parser.parse_args()


def _names(asked: Iterable[str]) -> list[str]:
    names = [name for word in asked for name in KINDS.get(word, {word: None})]
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        sys.exit(f"no models or kinds {unknown}; there are {', '.join([*KINDS, *CATALOGUE])}")
    return names or list(CATALOGUE)


def _in_own_process(name: str, modes: list[str], timeout: int) -> dict[str, Any]:
    """The results of a model, by mode; a mode that was not reached in time says so."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure_modes, args=(name, modes, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = {}
    end = time.monotonic() + timeout
    while len(found) < len(modes) and ours.poll(max(0.0, end - time.monotonic())):
        try:
            mode, result = ours.recv()
        except EOFError:
            break
        found[mode] = result
    if process.is_alive() and len(found) < len(modes) and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    reason = f"no result within {timeout} s" if process.exitcode == -signal.SIGKILL else "the process died"
    return {mode: found.get(mode, {"failed": "not measured", "why": reason}) for mode in modes}


def _measure_modes(name: str, modes: list[str], answers: Any) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for mode in modes:
        start = time.perf_counter()
        result = _measure(name, mode)
        answers.send((mode, {**result, "seconds": round(time.perf_counter() - start, 1)}))


def _measure(name: str, mode: str) -> dict[str, Any]:
    try:
        return asdict(measure(CATALOGUE[name], mode))
    except AssertionError as error:
        return {"failed": "wrong", "why": str(error)}
    except fxdp.FxdpError as error:
        return {"failed": "refused", "why": str(error)}
    except Exception as error:  # a bug of fxdp: it belongs into the table, too
        return {"failed": "error", "why": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
