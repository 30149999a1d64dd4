"""Ragged batches: is each model exact, uncompiled and compiled, where ranks hold very uneven parts?

    python -m benchmarks.conformance.ragged                 # all models; `ragged.md` anew
    python -m benchmarks.conformance.ragged GCN GRPO        # some; the others keep their rows
    python -m benchmarks.conformance.ragged GCN --ways compiled

Six samples, of which two have no image, edge, box or token. Two ranks hold 5 and 1 (a bare one), four 3, 0, 1
(a bare one) and 2; of graphs 3, 1 (without nodes), 1 and 1. In float64, beside one device. Ways:

  global     uncompiled, global tensors, virtual ranks: loss, gradients, parameters after a step of SGD
  replicate  compiled, virtual ranks: every node, the loss and the gradients
  shard      the same with sharded parameters
  micro      compiled, in two micro-batches, real ranks: loss, gradients, parameters after a step of SGD
  fallback   `fallback="eager"`, real ranks, where capture refuses: the same

Exit code 1 where a number differs by more than 1e-9, or a way that is not refused fails. Models of
torch_geometric need it, and are left out without it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxdp
from benchmarks.conformance import kept
from benchmarks.conformance.ragged_models.case import Case
from fxdp.eager.loader import _entered
from tests.capture.zoo import keep_float64
from tests.eager.running import difference, plain
from tests.eager.virtual import on_virtual_ranks
from tests.zoo.measure import default_float64

WORLDS = (2, 4)
WAYS = ("global", "replicate", "shard", "micro", "fallback")
EXACT = 1e-9
RESULTS = kept.FOLDER / "ragged.json"
TABLE = Path(__file__).with_name("ragged.md")
KINDS = ("sequences", "boxes", "pictures", "graphs")
Numbers = dict[str, Any]


@functools.cache
def cases() -> dict[str, Case]:
    """All models that this environment has."""
    found: dict[str, Case] = {}
    for kind in KINDS:
        if kind != "graphs" or importlib.util.find_spec("torch_geometric"):
            module = importlib.import_module(f"benchmarks.conformance.ragged_models.{kind}")
            found |= module.CASES
    return found


def _made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().double().train()


def _step(model: nn.Module, loss: Tensor) -> Numbers:
    """The loss, the gradients, and parameters after a step of SGD."""
    loss.backward()
    found = {"loss": loss.detach()}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"gradient of {name}": _full(grad) for name, grad in grads.items()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return found | {name: _full(p.detach()) for name, p in model.named_parameters()}


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def _expected(case: Case) -> Numbers:
    model = _made(case)
    return plain(_step(model, model(**case.inputs(case.batch(range(sum(case.splits[2])))))))


def _global(case: Case, world: int) -> float:
    parts, dims = case.parts(world), None if case.recognised else case.rows

    def on_rank(ranks: Any) -> Numbers:
        model = _made(case)
        return plain(_step(model, model(**case.inputs(_entered(parts[ranks.rank], ranks, dims)))))

    expected = _expected(case)
    return _worst(difference(expected, one) for one in on_virtual_ranks(world, on_rank))


def _virtual(strategy: str) -> Callable[[Case, int], float]:
    def compared(case: Case, world: int) -> float:
        report = fxdp.verify(
            _made(case), (), case.inputs(case.batch(range(sum(case.splits[world])))), {"dp": world},
            splits=[case.splits[world]], batch_dims=case.dims(), strategy=strategy, tolerance=EXACT,
        )  # fmt: skip
        if not report.ok:
            raise AssertionError(str(report))
        return max(run.worst for run in report.splits)

    return compared


def _real(**options: Any) -> Callable[[Case, int], float]:
    def compared(case: Case, world: int) -> float:
        expected = _expected(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            every = fxdp.launch(_on_rank, _name_of(case), options, nproc=world)
        return _worst(difference(expected, one) for one in every)

    return compared


def _on_rank(name: str, options: dict[str, Any]) -> Numbers:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = cases()[name]
    with keep_float64(), default_float64():
        model = _made(case)
        dims = None if case.recognised and "fallback" in options else case.dims()
        compiled = fxdp.compile(model, batch_dims=dims, backend="eager", **options)
        part = case.parts(dist.get_world_size())[dist.get_rank()]
        return plain(_step(compiled, compiled(**case.inputs(part))))


def _name_of(case: Case) -> str:
    return next(name for name, other in cases().items() if other is case)


def _worst(found: Any) -> float:
    error, where = max(found)
    if error > EXACT:
        raise AssertionError(f"{error:.0e} in {where}")
    return float(error)


RUNS: Mapping[str, Callable[[Case, int], float]] = {
    "global": _global, "replicate": _virtual("replicate"), "shard": _virtual("shard"),
    "micro": _real(pipeline={"microbatches": 2}), "fallback": _real(fallback="eager"),
}  # fmt: skip


def one(name: str, way: str) -> dict[str, str]:
    """The largest difference of a model in one way, by number of ranks, or the reason why there is none."""
    case, found = cases()[name], {}
    for world in WORLDS if way in ("global", "replicate", "shard") else WORLDS[:1]:
        try:
            with keep_float64(), default_float64():
                found[str(world)] = f"{RUNS[way](case, world):.0e}"
        except AssertionError as error:
            found[str(world)] = f"wrong: {_short(error)}"
        except Exception as error:  # whatever a model raises
            found[str(world)] = f"refused: {_short(error)}"
    return found


def _short(error: BaseException) -> str:
    """The first sentence of an error, with paths from the library on."""
    text = re.sub(r"/\S*/site(-packages)?/", "", " ".join(str(error).split()))
    return text.partition(". ")[0][:300]


def main() -> int:
    """Measure, write the table, and return 1 if a number is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="models (default: all)")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    asked = parser.parse_args()
    known = cases()
    if unknown := set(asked.names) - known.keys():
        parser.error(f"no models {sorted(unknown)}; there are {', '.join(known)}")
    rows = _kept()
    for name in asked.names or known:
        for way in asked.ways:
            if way == "fallback" and not _is_refused(rows.get(name, {})):
                continue
            found = one(name, way)
            print(f"{name:24} {way:10} {found}", flush=True)
            rows = _kept()
            rows.setdefault(name, {})[way] = found
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    TABLE.write_text(page(rows, {name: case.axes for name, case in known.items()}))
    told = [text for row in rows.values() for found in row.values() for text in found.values()]
    return int(any(text.startswith("wrong") for text in told))


def _kept() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _is_refused(row: dict[str, dict[str, str]]) -> bool:
    return any(text.startswith("refused") for text in row.get("replicate", {"2": "refused"}).values())


_HEAD = """# Ragged batches: models beside one device

Made by `python -m benchmarks.conformance.ragged`, models and ways in runs of their own;
do not edit by hand. Six samples, of which two have no image, edge, box or token; parts of 5 and 1
samples, and of 3, 0, 1 and 2 (graphs: 3, 1, 1 and 1, the second without nodes). The largest
relative difference in float64 on 2 / 4 ranks: uncompiled on global tensors and
compiled on virtual ranks, in micro-batches and by `fallback="eager"` on two real ranks.

"""


def page(rows: Mapping[str, dict[str, dict[str, str]]], axes: Mapping[str, str]) -> str:
    """The table as Markdown, and the reasons below it."""
    lines = [f"| model | axes | {' | '.join(WAYS)} |", "|---|---|" + "---|" * len(WAYS)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in axes:
        row = rows.get(name, {})
        cells = [_cell(row.get(way, {})) for way in WAYS]
        lines.append(f"| {name} | {axes[name]} | {' | '.join(cells)} |")
        for way, found in row.items():
            for text in {text for text in found.values() if not text[:1].isdigit()}:
                reasons.setdefault((name, text), []).append(way)
    told = [f"- **{name}**, {', '.join(ways)}: {text}" for (name, text), ways in reasons.items()]
    return _HEAD + "\n".join([*lines, "", *told]) + "\n"


def _cell(found: Mapping[str, str]) -> str:
    """The differences on each number of ranks, or the first word of the reason why there is none."""
    told = [text if text[:1].isdigit() else text.partition(":")[0] for text in found.values()]
    if len(set(told)) == 1 and not told[0][:1].isdigit():
        return told[0]
    return " / ".join(told) or "not run"


if __name__ == "__main__":
    sys.exit(main())
