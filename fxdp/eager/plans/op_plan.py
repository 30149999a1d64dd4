"""The plan of one kind of call of an op: placements of operands, local op and arguments, results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

import fxdp.rules  # noqa: F401  (registers the rules)
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.plans.hypotheses import (
    AS_RESHAPE,
    Hypothesis,
    Result,
    hypotheses,
    operand_types,
    proven_results,
)
from fxdp.eager.plans.index_values import iotas
from fxdp.eager.plans.placed_call import PlacedCall
from fxdp.eager.plans.plan_families import ProvenChoice, recalled, remember
from fxdp.eager.spec import GlobalSpec, spec_of
from fxdp.eager.sums import SMALL
from fxdp.ir.graph.draws import draws
from fxdp.ir.ops.layouts import READ_AS_THEY_LIE
from fxdp.ir.types.decompositions import Decomposition, Term
from fxdp.ir.types.placements import P, Partial, Placement, R, Shard
from fxdp.ir.types.sizes import B, batch_factor, exact_quotient, number
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.chooser import priced
from fxdp.placing.memory_order import order_and_gaps
from fxdp.rules.families.random import drawn_for_full_batch
from fxdp.rules.localize import local_target, localized
from fxdp.rules.registry import Alternative, Op, Operand, Pointer, registry
from fxdp.torch_compat import OpOverload

_SENDS = 1.0
"""The least cost of an alternative that sends anything; slicing costs less."""


@dataclass(frozen=True, slots=True)
class PlannedResult:
    """The spec of a result, and the reduction with which it is made.

    A small sum (`is_small_sum`) has the spec of its terms: when it is reduced is decided when it is made.
    """

    spec: GlobalSpec
    reduced: Partial | None = None
    is_small_sum: bool = False


@dataclass(slots=True)
class OpPlan:
    """How each rank runs one kind of call.

    Attributes
    ----------
    target, args, kwargs : the local call; operands are `Operand` or `MinusOffset`.
    axis : the batch axis; `DataRanks.unit` if nothing is sharded.
    wants : the placement of each operand.
    types : the operands' types in `B`.
    foreign : operands sharded along a different axis, which are gathered first.
    results : specs of the results; None: full values, whose shapes are known after the run.
    decomposition : ops that run in place of `target`.
    restrides : whether the kernel depends on strides.
    shares : whether the result of a view op shares memory with the first operand.
    draws : whether the call draws random numbers.
    sends : whether a run sends anything, beyond slices.
    reason : why the op runs on full values; empty if it does not.
    """

    op: OpOverload
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axis: BatchAxis
    wants: tuple[Placement, ...]
    types: tuple[TensorType, ...]
    foreign: tuple[bool, ...]
    results: tuple[PlannedResult | None, ...] | None = None
    decomposition: Decomposition | None = None
    restrides: bool = False
    shares: bool = False
    draws: bool = False
    sends: bool = True
    reason: str = ""


def cheapest_plan(call: PlacedCall) -> OpPlan | None:
    """Return the plan with the least to send over all hypotheses that hold; None if none holds."""
    known = recalled(call) if call.sharded else None
    if known is not None:
        return _plan(call, known)
    best: ProvenChoice | None = None
    axis = call.axis if call.sharded else None
    for hypothesis in hypotheses(call.leaves, call.placements, axis):
        types = operand_types(call.leaves, call.known, hypothesis)
        results = proven_results(call.op, call.leaves, types, hypothesis, axis)
        if results is None:
            continue
        pointers = [
            Pointer("", Shard(dim))
            if dim is not None and type_.shape[dim] == B
            else None  # of a batch of 1, [0] is arange(B), too
            for dim, type_ in zip(iotas(call.op, call.leaves.tensors, axis), types, strict=True)
        ]
        operands = tuple(map(Operand, range(len(types)), types, ((p,) for p in call.placements), pointers))
        args, kwargs = call.leaves.filled(operands, dict(hypothesis.sizes))
        outputs = tuple(None if r is None else r.type for r in results)
        op = Op(call.op, tuple(args), tuple(kwargs.items()), operands, outputs)
        candidates = [a for a in _alternatives(op, call.leaves.tensors) if _can_be_cut(a, op)]
        for alternative, cost, total, rank in priced(op, candidates):
            key = float(round(total)), rank  # slices do not count: what follows is worth more than a slice
            if best is None or key < best.key:
                best = ProvenChoice(key, cost, op, alternative, results, hypothesis)
        if best is not None and best.cost < _SENDS:
            break
    if best is None:
        return None
    if call.sharded:
        remember(call, best)
    return _plan(call, best)


def full_plan(call: PlacedCall, reason: str) -> OpPlan:
    """Return the plan that runs the op on full values on every rank."""
    known = tuple(TensorType(t.dtype, tuple(t.shape)) for t in call.leaves.tensors)
    proven = proven_results(call.op, call.leaves, known, Hypothesis(), None)
    results = None if proven is None else tuple(_full_results(proven, call.axis))
    operands = [Operand(i, t) for i, t in enumerate(call.known)]
    args, kwargs = call.leaves.filled(operands, {}, kind=list)
    op = call.op
    apart = call.in_parts or any(call.foreign)
    return OpPlan(
        op, AS_RESHAPE.get(op, op), tuple(args), kwargs, call.axis, (R,) * len(operands), call.known,
        call.foreign, results, restrides=op in READ_AS_THEY_LIE, shares=op.is_view and not apart,
        draws=draws(op, args, kwargs), reason=reason if apart else "",
    )  # fmt: skip


def _alternatives(op: Op, tensors: Sequence[Tensor]) -> Iterator[Alternative]:
    if draws(op.target, op.args, dict(op.kwargs)):
        sizes, strides = (tuple(tensors[0].shape), tuple(tensors[0].stride())) if tensors else ((), ())
        order, gaps = order_and_gaps(sizes, strides)
        yield from drawn_for_full_batch(op, order, gaps, one_rank=False)
        return
    yield op.alternative()
    found = registry.get(op.target)
    if found is not None:
        yield from found.rule(op)


def _can_be_cut(alternative: Alternative, op: Op) -> bool:
    """Return whether every dim that an alternative shards is a multiple of the batch.

    Rules do not check their outputs: in a graph the sizes are known. Under a wrong hypothesis they are not.
    """
    pairs = [*zip(alternative.inputs, (o.type for o in op.operands), strict=True)]
    pairs += zip(alternative.outputs, op.outputs, strict=True)  # type: ignore[arg-type]
    for placement, type_ in pairs:
        if isinstance(placement, Shard):
            if type_ is None or placement.dim >= len(type_.shape):
                return False
            factor = batch_factor(type_.shape[placement.dim])
            if factor is None or exact_quotient(factor, placement.outer) is None:
                return False
    return True


def _plan(call: PlacedCall, choice: ProvenChoice) -> OpPlan:
    op, alternative = choice.op, choice.alternative
    pairs = zip(alternative.inputs, call.placements, strict=True)
    wants = tuple(have if want is None else want for want, have in pairs)
    args, kwargs = localized(op, alternative)
    values = call.axis.values
    target = local_target(op, alternative)
    gathers = any(isinstance(h, Shard) and w == R for h, w in zip(call.placements, wants, strict=True))
    return OpPlan(
        op.target, AS_RESHAPE.get(target, target), numbers(args, values),
        {name: numbers(value, values) for name, value in kwargs.items()},
        call.axis, wants, tuple(o.type for o in op.operands), call.foreign,
        results=tuple(_results(choice, call.axis)), decomposition=alternative.decomposition,
        restrides=op.target in READ_AS_THEY_LIE,
        shares=op.target.is_view and bool(wants) and wants[0] == call.placements[0] and not call.foreign[0],
        draws=draws(op.target, op.args, dict(op.kwargs)), sends=choice.cost >= _SENDS,
        reason="its rule has no cheaper way" if gathers else "",
    )  # fmt: skip


def _full_results(results: Iterable[Result | None], axis: BatchAxis) -> Iterator[PlannedResult | None]:
    for one in results:
        if one is None:
            yield None
        else:
            layout = axis.ranks.unit.full
            yield PlannedResult(spec_of(one.type.dtype, one.shape, one.stride, one.device, layout))


def _results(choice: ProvenChoice, axis: BatchAxis) -> Iterator[PlannedResult | None]:
    placements = list(choice.alternative.outputs)
    if choice.alternative.decomposition is not None:
        placements = _placements_at_end(choice.alternative.decomposition)
    for placement, result in zip(placements, choice.results, strict=True):
        if placement is None or result is None:
            yield None
            continue
        reduced, is_small = None, torch.Size(result.shape).numel() <= SMALL
        is_small_sum = is_small and placement == P
        if isinstance(placement, Partial) and is_small and not is_small_sum:
            reduced, placement = placement, R
        layout = axis.layout(placement)
        yield PlannedResult(
            spec_of(result.type.dtype, result.shape, result.stride, result.device, layout),
            reduced,
            is_small_sum,
        )


def _placements_at_end(decomposition: Decomposition) -> list[Placement | None]:
    """Return the placements of the results after all steps: a sum that a later step reads is reduced."""
    read = {(a.index, a.at) for step in decomposition.steps for a in step.args if isinstance(a, Term)}
    found: list[Placement | None] = []
    for term in decomposition.results:
        if term is None:
            found.append(None)
        elif term.index < 0 and (term.index, R) in read:
            found.append(R)
        else:
            found.append(decomposition.steps[-term.index - 1].at if term.index < 0 else term.at)
    return found


def numbers(value: Any, values: dict[str, int]) -> Any:
    """Return arguments with numbers for expressions, and lists for tuples, as ops take them."""
    if isinstance(value, (tuple, list)):
        return [numbers(one, values) for one in value]
    return number(value, values) if isinstance(value, sympy.Basic) else value
