"""Which of the models that capture refuses run by `fallback="eager"`, and how exactly; writes `FALLBACK.md`.

    python -m benchmarks.conformance.fallback  # all that `results/zoo.csv` has as refused in training
    python -m benchmarks.conformance.fallback vilt udop  # some of them; the others keep their rows

A step of training (loss, gradients, buffers) in float64 on real ranks with uneven and empty parts, beside one
eager device with the same seed.
"""

from __future__ import annotations

import csv
import json
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxdp
from benchmarks.conformance import kept
from fxdp.capture.batch_dims import resolve_batch_dims
from fxdp.capture.refusals.stateful import copy_of
from tests.capture.zoo import keep_float64
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.measure import SEED, default_float64, make

SPLITS = ((5, 3), (5, 0, 3))
RESULTS = kept.FOLDER / "fallback.json"
TABLE = Path(__file__).with_name("FALLBACK.md")
LIMIT_S = 600
_EXACT = 1e-9
_HEAD = """# Models that capture refuses, by `fallback="eager"`

Made by `python -m benchmarks.conformance.fallback`; do not edit by hand. A step of training in float64 on
real ranks that hold 5 and 3, or 5, 0 and 3 samples, beside one eager device: the largest relative error of
loss, gradients and buffers. `ragged`: samples have no rows of their own along one dim, so that no
rank's part has a size.

"""


def refused() -> list[str]:
    """The models of the catalogue whose training step capture refuses."""
    with (kept.FOLDER / "zoo.csv").open() as file:
        return [row["name"] for row in csv.DictReader(file) if row["train"] == "refused"]


def _step(call: Any, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(SEED)
    with mock.patch.object(torch, "seed", return_value=SEED):  # reformer's, which no second run has
        loss = call(**inputs).loss
        loss.backward()
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, **dict(model.named_buffers())}


def _on_rank(name: str, split: tuple[int, ...]) -> tuple[float, str]:
    torch.set_num_threads(1)
    logging.disable()
    entry = CATALOGUE[name]
    model, inputs = make(entry)
    model.train()
    with keep_float64(), default_float64():
        twin = copy_of(model)
        expected = _step(twin, twin, inputs)
        local = _part(inputs, iter(resolve_batch_dims((), inputs, entry.batch_dims)), split)
        compiled = fxdp.compile(model, backend="eager", fallback="eager", batch_dims=entry.batch_dims)
        got = _step(compiled, model, local)
    if lacking := expected.keys() ^ got.keys():
        return float("inf"), f"lacking: {sorted(lacking)[:3]}"
    return max((_relative(value, got[key]), key) for key, value in expected.items() if value.numel())


def _part(inputs: dict[str, Any], dims: Iterator[int | None], split: tuple[int, ...]) -> dict[str, Any]:
    """This rank's samples: elements of a list, rows of a tensor, of which a sample may have several."""
    rank, total = dist.get_rank(), sum(split)
    first = sum(split[:rank])

    def part(value: Tensor) -> Tensor:
        dim = next(dims)
        rows = 1 if dim is None else value.shape[dim] // total
        return value if dim is None else value.narrow(dim, first * rows, split[rank] * rows)

    found = {}
    for name, value in inputs.items():
        if isinstance(value, list) and len(value) == total:
            found[name] = value[first : first + split[rank]]
            for _ in filter(lambda leaf: isinstance(leaf, Tensor), pytree.tree_leaves(value)):
                next(dims)
        else:
            found[name] = pytree.tree_map_only(Tensor, part, value)
    return found


def _relative(expected: Tensor, got: Tensor) -> float:
    error = float((got.double() - expected.double()).abs().max())
    return error / max(float(expected.abs().max()), 1e-3)


def measure(name: str) -> dict[str, str]:
    """The largest errors of a model, or why it does not run, by split."""
    found = {}
    for split in SPLITS:
        command = [sys.executable, "-m", "benchmarks.conformance.fallback", "--one", name, json.dumps(split)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            found[str(split)] = told[-1].removeprefix("RESULT ") if told else done.stderr.strip()[-300:]
        except subprocess.TimeoutExpired:
            found[str(split)] = f"no result in {LIMIT_S} s"
    return found


def _one(name: str, split: tuple[int, ...]) -> str:
    try:
        error, where = max(fxdp.launch(_on_rank, name, split, nproc=len(split)))
    except Exception as error:  # whatever a model raises on a rank
        text = " ".join(str(error).split())
        return "ragged" if "batch sizes differ" in text else f"refused: {text[-400:]}"
    return f"{error:.0e}" if error <= _EXACT else f"wrong: {error:.0e} in {where}"


def page(rows: dict[str, dict[str, str]]) -> str:
    """The table as Markdown."""
    exact = [name for name, row in rows.items() if all(text[:1].isdigit() for text in row.values())]
    ragged = [name for name, row in rows.items() if set(row.values()) == {"ragged"}]
    lines = [f"**{len(exact)} of {len(rows)} run so and are exact**; {len(ragged)} are ragged.", ""]
    lines += [f"| model | {' | '.join(map(str, SPLITS))} |", f"|{'---|' * (1 + len(SPLITS))}"]
    for name, row in rows.items():
        cells = (row[str(split)].replace("|", "/") for split in SPLITS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return _HEAD + "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Measure, write, and return 1 if a model runs and is wrong."""
    if arguments[:1] == ["--one"]:
        print("RESULT", _one(arguments[1], tuple(json.loads(arguments[2]))))
        return 0
    rows: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments or refused():
        rows[name] = measure(name)
        print(name, rows[name], flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        TABLE.write_text(page(dict(sorted(rows.items()))))
    return int(any(text.startswith("wrong") for row in rows.values() for text in row.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
