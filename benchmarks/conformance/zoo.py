"""Every model of the catalogue on virtual ranks against one eager device; writes `ZOO.md`.

    python -m benchmarks.conformance.zoo  # all models and modes, three hours
    python -m benchmarks.conformance.zoo swin "visible zoo" --modes train  # some models or kinds
    python -m benchmarks.conformance.zoo --missing  # go on where a sweep was stopped
    python -m benchmarks.conformance.zoo --page  # no sweep: the page from what is known
    python -m benchmarks.conformance.zoo --library timm  # the smallest model of each family that it lists
    python -m benchmarks.conformance.zoo --library all --missing  # of all libraries, each in its turn

A model is measured in a process of its own, with a time limit. Results gather in tables (`results/*.csv`),
from which the page is made; models that were not asked for keep their rows.
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
from benchmarks.conformance import kept
from benchmarks.conformance.libraries.entries import LIBRARIES
from benchmarks.conformance.libraries.sweep import sweep
from benchmarks.conformance.libraries.table import library_page, library_summary
from benchmarks.conformance.zoo_table import markdown
from benchmarks.harness.own_process import in_own_process
from tests.zoo.catalogue import CATALOGUE, KINDS
from tests.zoo.measure import MODES, measure

CONSOLE = Console()
PUBLIC = kept.FOLDER / "zoo_public.json"
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
        rows = [row for library in libraries for row in kept.read(library).values()]
        wrong = any(row["train"] in ("wrong", "error") for row in rows)
    elif not asked.page:
        wrong = _sweep_catalogue(asked)
    TABLE.write_text(
        "\n".join([_catalogue(), library_summary(LIBRARIES), *filter(None, map(library_page, LIBRARIES))])
    )
    CONSOLE.print(f"wrote {TABLE}")
    return int(wrong)


def _sweep_catalogue(asked: argparse.Namespace) -> bool:
    """Measure what is asked for; whether any row of the catalogue is wrong."""
    rows = kept.read("zoo")
    for name in _names(asked.models):
        row = rows.setdefault(name, {})
        modes = [mode for mode in asked.modes if not (asked.missing and mode in row)]
        if modes:
            found = in_own_process(modes, partial(_measure, name), asked.timeout)
            kept.meta("zoo", name, found)
            rows[name] = kept.updated(row, found)
            kept.write("zoo", rows)
            CONSOLE.print(f"{name}: " + ", ".join(f"{mode} {rows[name][mode]}" for mode in modes))
    return any(row.get(mode) == "wrong" for row in rows.values() for mode in MODES)


def _catalogue() -> str:
    found = kept.read("zoo")
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
