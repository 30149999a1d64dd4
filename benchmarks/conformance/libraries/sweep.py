"""The sweep over a library's own list: the smallest model of each family, in training, with a loss."""

from __future__ import annotations

import importlib.metadata
import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from rich.console import Console

import fxdp
from benchmarks.conformance import kept
from benchmarks.conformance.libraries.entries import Families, families
from benchmarks.harness.own_process import Result, in_own_process
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.entry import Entry
from tests.zoo.measure import Measured, WrongError, measure

SPLITS = ((5, 0, 1),)
LISTED = kept.FOLDER / "libraries.json"
_FAILS_WIDE = ("the model itself fails", "values of different dtypes")
"""Where the model makes float32 itself, beside parameters in float64."""
CONSOLE = Console()


def sweep(libraries: Sequence[str], names: Sequence[str], *, timeout: float, missing: bool) -> None:
    """Measure families of libraries (all, if none is named); results gather in tables.

    Each library has its turn, in an order that no name decides: where a sweep is stopped, what it has
    measured is a sample of each.
    """
    listed = {library: families(library) for library in libraries}
    _warm()
    orders = [[(library, name) for name in _order(listed[library], names)] for library in libraries]
    for library, name in filter(None, chain.from_iterable(zip_longest(*orders))):
        if not (missing and name in kept.read(library)):
            row = in_own_process(["train"], partial(_measure, listed[library], name), timeout)["train"]
            _keep(library, len(listed[library]), name, row)


def _warm() -> None:
    """What torch and sympy set up for the first capture, the processes of all families inherit."""
    warnings.simplefilter("ignore")
    measure(CATALOGUE["gpt2"], "train", SPLITS)


def _order(listed: Families, names: Sequence[str]) -> list[str]:
    """Those that are asked for; all in an order that is always the same and has nothing to do with names."""
    return list(names) or sorted(listed, key=lambda name: random.Random(name).random())


def _keep(library: str, listed: int, name: str, result: Result) -> None:
    rows = kept.read(library)
    model = {"model": result["model"]} if "model" in result else {}
    kept.meta(library, name, {"train": result})
    rows[name] = kept.updated(model, {"train": result})
    kept.write(library, dict(sorted(rows.items())))
    counted = {"version": importlib.metadata.version(library), "listed": listed}
    LISTED.write_text(json.dumps({**listings(), library: counted}, indent=1) + "\n")
    why = kept.reasons(rows[name]).get("train", "")[:200]
    CONSOLE.print(
        f"{library} {name}: {rows[name]['train']} {result.get('seconds')} s {why}",
        highlight=False, markup=False,
    )  # fmt: skip


def listings() -> dict[str, dict[str, Any]]:
    """The version of each library that was measured, and how many families it lists."""
    return json.loads(LISTED.read_text()) if LISTED.exists() else {}  # type: ignore[no-any-return]


def _measure(listed: Families, name: str, _mode: str) -> Result:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        member = listed[name]()
    except Exception as error:
        return {"failed": "not run by eager", "why": f"{type(error).__name__}: {error}"[:160]}
    model = member.name
    try:
        return {"model": model, **asdict(_measured(member.entry))}
    except WrongError as error:
        return {"model": model, "failed": "wrong", "why": str(error)}
    except fxdp.FxdpError as error:
        kind = "error" if isinstance(error, fxdp.VerifierError) else "refused"
        return {"model": model, "failed": kind, "why": str(error)}
    except Exception as error:  # a bug of fxdp: it belongs into the table, too
        return {"model": model, "failed": "error", "why": f"{type(error).__name__}: {error}"}


def _measured(entry: Entry) -> Measured:
    """In float64; where eager fails there, with integers that the model makes floats in float64, too."""
    try:
        return measure(entry, "train", SPLITS)
    except fxdp.FxdpError as error:
        if not any(words in str(error) for words in _FAILS_WIDE):
            raise
        return measure(entry, "train", SPLITS, integers=True)
