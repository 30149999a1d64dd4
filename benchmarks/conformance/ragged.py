"""Ragged batches: is each model exact, uncompiled and compiled, where ranks hold very uneven parts?

    python -m benchmarks.conformance.ragged                 # all models; `ragged.md` anew
    python -m benchmarks.conformance.ragged GCN GRPO        # some; the others keep their rows
    python -m benchmarks.conformance.ragged GCN --ways compiled

Six samples, of which two have no image, edge, box or token. Two ranks hold 5 and 1 (a bare one), four 3, 0, 1
(a bare one) and 2; of graphs 3, 1 (without nodes), 1 and 1. In float64, beside one device. Ways:

  global     uncompiled, global tensors, virtual ranks: loss, gradients, parameters after a step of SGD
  replicate  compiled, virtual ranks: every node, the loss and the gradients
  shard      the same with sharded parameters; both on two real ranks where inputs do not tell samples apart
  micro      compiled, in two micro-batches, real ranks: loss, gradients, parameters after a step of SGD
  fallback   `fallback="eager"`, real ranks, where capture refuses: the same

Real ranks are started once for all models, and virtual ones share one capture of a model. Exit code 1 where a
number differs by more than 1e-9, or a way fails by an error that is none of fxdp's. Models of torch_geometric
need it, and are left out without it; the table is written with it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxdp
from benchmarks.conformance import kept
from benchmarks.conformance.ragged_models.case import SAMPLES, Case
from benchmarks.conformance.ragged_table import WAYS, Found, is_refused, page
from fxdp.eager.loader import _entered
from fxdp.errors import FxdpError, RankFailedError
from fxdp.oracle import verify
from tests.capture.zoo import keep_float64
from tests.eager.running import difference, plain
from tests.eager.virtual import on_virtual_ranks
from tests.zoo.measure import default_float64

WORLDS = (2, 4)
EXACT = 1e-9
_UNCUT = ("cut where samples end", "expected all of its")
"""Of the error where rows belong to no sample of the case, so that virtual ranks have no parts."""
PATIENCE = 600.0
"""Seconds for a model on real ranks."""
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
        with mock.patch.object(verify, "captured", _captured_once(id(case))):
            report = fxdp.verify(
                _made(case), (), case.inputs(case.batch(range(sum(case.splits[world])))), {"dp": world},
                splits=[case.splits[world]], batch_dims=case.dims(), strategy=strategy, tolerance=EXACT,
            )  # fmt: skip
        if not report.ok:
            raise AssertionError(str(report))
        return max(run.worst for run in report.splits)

    return compared


@functools.lru_cache(1)
def _captured_once(case: int) -> Callable[..., Any]:
    """Capture the global batch of a model, by identity, for all strategies and numbers of ranks."""
    capture = verify.captured
    kept: list[Any] = []

    def captured(*given: Any) -> Any:
        if not kept:
            try:
                kept.append(capture(*given))
            except FxdpError as error:
                kept.append(error)
        if isinstance(kept[0], FxdpError):
            raise kept[0]
        return kept[0]

    return captured


def _on_ranks(names: Sequence[str], options: dict[str, Any]) -> Iterator[tuple[str, Found]]:
    """Run models on the same real ranks, or each on ranks of its own where these end."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            limit = PATIENCE * len(names)
            every = fxdp.launch(_on_rank, list(names), options, nproc=WORLDS[0], timeout=limit)
    except Exception as error:
        if len(names) > 1:
            for name in names:
                yield from _on_ranks([name], options)
        else:
            yield names[0], {str(WORLDS[0]): _reason(error)}
        return
    for name in names:
        told = next((one[name] for one in every if isinstance(one[name], str)), None)
        yield name, {str(WORLDS[0]): told or _tried(lambda name=name: _against(cases()[name], every, name))}


def _against(case: Case, every: Sequence[Mapping[str, Numbers]], name: str) -> float:
    expected = _expected(case)
    return _worst(difference(expected, one[name]) for one in every)


def _on_rank(names: Sequence[str], options: dict[str, Any]) -> dict[str, Numbers | str]:
    """Return of each model its numbers on this rank, or why it has none."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Numbers | str] = {}
    for name in names:
        case = cases()[name]
        try:
            with keep_float64(), default_float64():
                model = _made(case)
                compiled = fxdp.compile(model, batch_dims=case.dims(), backend="eager", **options)
                part = case.parts(dist.get_world_size())[dist.get_rank()]
                found[name] = plain(_step(compiled, compiled(**case.inputs(part))))
        except Exception as error:  # whatever a model raises
            found[name] = _reason(error)
    dist.barrier()  # a rank that ends interrupts those that still capture a model
    return found


def _worst(found: Any) -> float:
    error, where = max(found)
    if error > EXACT:
        raise AssertionError(f"{error:.0e} in {where}")
    return float(error)


VIRTUAL: Mapping[str, Callable[[Case, int], float]] = {
    "global": _global, "replicate": _virtual("replicate"), "shard": _virtual("shard"),
}  # fmt: skip
REAL: Mapping[str, dict[str, Any]] = {
    "micro": {"pipeline": {"microbatches": 2}}, "fallback": {"fallback": "eager"},
}  # fmt: skip


def measured(names: Sequence[str], way: str) -> Iterator[tuple[str, Found]]:
    """Yield of each model the largest difference by number of ranks, or the reason why there is none."""
    if way in REAL:
        yield from _on_ranks(names, REAL[way])
        return
    for name in names:
        compare, case = VIRTUAL[way], cases()[name]
        found = {str(n): _tried(functools.partial(compare, case, n)) for n in WORLDS}
        if any(mark in text for text in found.values() for mark in _UNCUT):
            refusal = _refusal(name)
            yield from [(name, refusal)] if refusal else _on_ranks([name], {"strategy": way})
        else:
            yield name, found


@functools.cache
def _refusal(name: str) -> Found:
    """Say why capture refuses a model, for which no ranks need be started; empty if it does not."""
    case = cases()[name]
    inputs = case.inputs(case.batch(range(SAMPLES)))
    text = _tried(lambda: len(fxdp.plan(_made(case), (), inputs, batch_dims=case.dims()).collectives()))
    return {str(WORLDS[0]): text} if text.startswith("refused") else {}


def _tried(compare: Callable[[], float]) -> str:
    try:
        with keep_float64(), default_float64():
            return f"{compare():.0e}"
    except Exception as error:  # whatever a model raises
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return f"wrong: {_short(error)}"
    is_refused = isinstance(error, FxdpError) and not isinstance(error, RankFailedError)
    return f"{'refused' if is_refused else f'fails, {type(error).__name__}'}: {_short(error)}"


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
    names = list(asked.names or known)
    for group, ways in _runs(names, asked.ways):
        for way in ways:
            some = [name for name in group if way != "fallback" or is_refused(_kept().get(name, {}))]
            for name, found in measured(some, way) if some else ():
                print(f"{name:24} {way:10} {found}", flush=True)
                rows = _kept()
                rows.setdefault(name, {})[way] = found
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    rows = _kept()
    if absent := rows.keys() - known.keys():
        print(f"no table: {', '.join(sorted(absent))} need torch_geometric", file=sys.stderr)
    else:
        TABLE.write_text(page(rows, {name: case.axes for name, case in known.items()}))
    told = [text for row in rows.values() for found in row.values() for text in found.values()]
    return int(any(text.startswith(("wrong", "fails")) for text in told))


def _runs(names: Sequence[str], ways: Sequence[str]) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Yield models and ways: a model after the other on virtual ranks, then all on real ones."""
    for name in names:
        yield [name], [way for way in ways if way in VIRTUAL]
    yield names, [way for way in ways if way in REAL]


def _kept() -> dict[str, dict[str, Found]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
