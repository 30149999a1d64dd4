"""How far a model on virtual ranks is from one eager device, split by split of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.refusals.stateful import copy_of
from fxdp.compiler.program import Program
from fxdp.ir.graph.draws import kept_random_state
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options
from fxdp.oracle.precision import tolerances
from fxdp.oracle.verified_capture import branches_at, broken_conditions, capture_at, holds_nan, on_branch
from fxdp.oracle.verify import prepare_subject
from fxdp.oracle.virtual_run import Subject
from fxdp.reports.coverage import replicated_ops
from fxdp.reports.plan_data.collective_rows import communication
from tests.capture.zoo import keep_float64
from tests.zoo.entry import Entry

BATCH = 8
SEED = 1
"""Of what is drawn in a run that is compared."""
SPLITS: tuple[tuple[int, ...], ...] = ((8,), (4, 4), (5, 2), (2, 2, 2, 2), (5, 2, 0, 1))
"""World 1, 2 and 4, even and uneven."""
MODES = ("train", "eval", "no_grad")


class WrongError(AssertionError):
    """A node or a result that differs from one device."""


@dataclass
class Measured:
    """One model in one mode."""

    errors: dict[str, float] = field(default_factory=dict)
    """The largest relative error of any node or result, by split."""
    nodes: int = 0
    narrow: bool = False
    """Whether results pass through float32 although the model is in float64: 1e-6 is equal then."""
    collectives: int = 0
    """Collectives of a step before bucketing, at the largest world."""
    gathers: int = 0
    """Those of them that gather."""
    growing: tuple[str, ...] = ()
    """Those whose bytes grow with the batch: activations that travel."""
    fallbacks: list[str] = field(default_factory=list)
    """Ops that run on the global batch on every rank."""
    static: bool = False
    """The model fixed its batch size: the graph was fitted from several."""


def make(entry: Entry) -> tuple[nn.Module, dict[str, Any]]:
    """The model in float64 and a batch of `BATCH`, always the same."""
    torch.manual_seed(0)
    model = entry.build().double()
    with default_float64():
        return model, entry.inputs(BATCH)


def measure(
    entry: Entry, mode: str, splits: Sequence[Sequence[int]] = SPLITS, *, integers: bool = False
) -> Measured:
    """Every node and result of the model in one mode, on each split; dropout draws what eager draws.

    `integers`: what the model calls `.float()` of integers is float64, too; also where it makes nan of them.

    Raises
    ------
    WrongError : something differs by more than 1e-9 (1e-6 behind the model's own casts to float32).
    FxdpError : the model cannot be captured or placed.
    """
    model, inputs = make(entry)
    model.train(mode == "train")
    chosen = Options(rng="single-device", batch_dims=entry.batch_dims)
    measured = Measured()
    wide = keep_float64(integers=integers)
    with wide, default_float64(), torch.set_grad_enabled(mode != "no_grad"):
        if _is_nan(model, inputs):
            if integers:
                raise WrongError("the model's own results are nan: nothing can be compared")
            return measure(entry, mode, splits, integers=True)
        captures: list[Captured] = []
        subjects: dict[tuple[int, int], Subject] = {}
        for split in splits:
            at = _capture_at(captures, model, inputs, chosen, sum(split))
            measured.static = captures[0].static
            if (at, len(split)) not in subjects:
                mesh = mesh_of({"dp": len(split)}, "cpu")
                local, reference = prepare_subject(model, captures[at], mesh, chosen)
                allowed = tolerances(local.gm, own=False)
                subjects[at, len(split)] = Subject(model, local.gm, reference, chosen, allowed)
                _count(measured, local, allowed)
            measured.errors[str(tuple(split))] = _error(subjects[at, len(split)], inputs, split)
    return measured


def _is_nan(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether one device's results are nan, which would equal anything that is nan."""
    try:
        with kept_random_state(), torch.no_grad():
            return holds_nan(copy_of(model)(**inputs))
    except Exception:  # capture says what it is
        return False


def _capture_at(
    captures: list[Captured], model: nn.Module, inputs: dict[str, Any], options: Options, batch: int
) -> int:
    """Which capture is good at a batch; one more is made where the model's code branches on its size."""
    full = ((), inputs)
    for index, found in enumerate(captures):
        holds = not broken_conditions(found, full, batch)
        if holds and on_branch(found, branches_at(found, model, full, options, batch, SEED)):
            return index
    captures.append(capture_at(model, full, options, batch, SEED))
    return len(captures) - 1


def _count(measured: Measured, local: Program, allowed: dict[str, float]) -> None:
    kinds = [str(getattr(node.target, "__name__", "")) for node in local.causes.graph.nodes]
    measured.nodes = local.nodes
    measured.gathers = kinds.count("all_gather")
    assert local.causes is not None
    small, large = (communication(local.causes, {"B": batch}) for batch in (BATCH, 1000 * BATCH))
    measured.growing = tuple(a.cause for a, b in zip(small, large, strict=True) if a != b)
    measured.collectives = measured.gathers + kinds.count("all_reduce") + kinds.count("reduce_scatter")
    measured.fallbacks = replicated_ops(local.causes)
    measured.narrow = max(allowed[node.name] for node in local.gm.graph.output_node().all_input_nodes) > 1e-9


def _error(subject: Subject, inputs: dict[str, Any], split: Sequence[int]) -> float:
    run = subject.run((), inputs, tuple(split), SEED)
    if not run.ok:
        raise WrongError(f"split {tuple(split)}:\n" + "\n".join(map(str, [*run.faults, *run.wrong])))
    return max([run.worst, *(row.error for row in run.results)])


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
