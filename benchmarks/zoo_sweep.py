"""Every model of the catalogue on virtual ranks against one eager device; writes `benchmarks/ZOO.md`.

    python benchmarks/zoo_sweep.py                        # all models and modes, three hours
    python benchmarks/zoo_sweep.py swin "visible zoo" --modes train    # some models or kinds
    python benchmarks/zoo_sweep.py --missing              # go on where a sweep was stopped
    python benchmarks/zoo_sweep.py --page                 # no sweep: the page from what is known
    python benchmarks/zoo_sweep.py --library timm    # the smallest model of each family that a library lists
    python benchmarks/zoo_sweep.py --library all --missing    # of all libraries, each in its turn

A model is measured in a process of its own, with a time limit. Results gather in a JSON file, from which the
table is made; models that were not asked for keep their rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import fxdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from library_entries import LIBRARIES
from library_sweep import known, sweep
from library_table import library_page, library_summary
from own_process import in_own_process
from zoo_table import markdown, state

from tests.zoo.catalogue import CATALOGUE, KINDS
from tests.zoo.measure import MODES, measure

CONSOLE = Console()
RESULTS = Path(__file__).with_name("zoo.json")
PUBLIC = Path(__file__).with_name("zoo_public.json")
TABLE = Path(__file__).with_name("ZOO.md")


def main() -> int:
    """Sweep, write, and return 1 if a model was captured and is not exact."""
    asked = _arguments()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = False
    if asked.library:
        libraries = LIBRARIES if asked.library == "all" else [asked.library]
        sweep(libraries, asked.models, timeout=asked.timeout, missing=asked.missing)
        rows = [row for library in libraries for row in known(library).values()]
        wrong = any(row.get("failed") in ("wrong", "error") for row in rows)
    elif not asked.page:
        wrong = _sweep_catalogue(asked)
    TABLE.write_text(
        "\n".join([_catalogue(), library_summary(LIBRARIES), *filter(None, map(library_page, LIBRARIES))])
    )
    CONSOLE.print(f"wrote {TABLE}")
    return int(wrong)


def _sweep_catalogue(asked: argparse.Namespace) -> bool:
    """Measure what is asked for; whether any row of the catalogue is wrong."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in _names(asked.models):
        row = found.setdefault(name, {})
        modes = [mode for mode in asked.modes if not (asked.missing and mode in row)]
        if modes:
            row |= in_own_process(modes, partial(_measure, name), asked.timeout)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            CONSOLE.print(f"{name}: " + ", ".join(f"{mode} {state(row[mode])}" for mode in modes))
    return any(row.get("failed") == "wrong" for modes in found.values() for row in modes.values())


def _catalogue() -> str:
    found = json.loads(RESULTS.read_text())
    rows = {kind: {name: found.get(name, {}) for name in names} for kind, names in KINDS.items()}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fxdp": fxdp.__version__,
    }
    return markdown(rows, versions, json.loads(PUBLIC.read_text()) if PUBLIC.exists() else {})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help="names of models or of kinds, or a library's families (default: all)"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--timeout", type=int, default=300, help="seconds per model")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], help="what it lists, not the catalogue")
    return parser.parse_args()


def _names(asked: Iterable[str]) -> list[str]:
    names = [name for word in asked for name in KINDS.get(word, {word: None})]
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        sys.exit(f"no models or kinds {unknown}; there are {', '.join([*KINDS, *CATALOGUE])}")
    return names or list(CATALOGUE)


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
