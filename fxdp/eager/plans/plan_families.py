"""Choices made for one batch size serve all others: a last, shorter batch asks no rule again.

    x: [8, 6] in S(0), view(x, [8, 2, 3])     8 counts samples: x: [B, 6], view(x, [B, 2, 3]), cut along B
    x: [5, 6] in S(0), view(x, [5, 2, 3])     the same call of 5 samples

A hypothesis that holds makes a call one of a family, for which the choice is exact at each batch size. So a
call that is the family's at its batch size takes the choice; one run on meta tensors gives the strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxdp.eager.plans.hypotheses import Hypothesis, Result, results_at
from fxdp.eager.plans.index_values import iotas
from fxdp.eager.plans.placed_call import PlacedCall
from fxdp.ir.graph.draws import draws
from fxdp.ir.types.sizes import B, evaluate
from fxdp.rules.registry import Alternative, Op

FAMILIES_KEPT = 4096
"""The most families that are kept; the oldest go first."""
_FAMILIES: dict[Any, list[tuple[ProvenChoice, tuple[int, ...]]]] = {}
"""Choices, with the integer arguments of the calls that they were made for, by what all calls share."""
_FEW = 4
"""The most choices of one family: others depend on further sizes."""


@dataclass(frozen=True, slots=True)
class ProvenChoice:
    """The alternative of a rule that a call runs by, under the hypothesis that holds."""

    key: tuple[float, tuple[int, int]]
    cost: float
    op: Op
    alternative: Alternative
    results: tuple[Result | None, ...]
    hypothesis: Hypothesis


def recalled(call: PlacedCall) -> ProvenChoice | None:
    """Return the choice of an earlier call of this family; None if there was none."""
    batch = call.axis.total
    if batch < 2:  # of one sample, ops do other things: `squeeze`, broadcasts
        return None
    for choice, sizes in _FAMILIES.get(_key(call), ()):
        if _is_of(call, choice, sizes):
            types = [operand.type for operand in choice.op.operands]
            results = results_at(call.op, call.leaves, types, choice.hypothesis, batch, choice.results)
            if results is not None:
                return replace(choice, results=results)
    return None


def remember(call: PlacedCall, choice: ProvenChoice) -> None:
    """Keep a choice for calls of other batch sizes, unless it depends on the strides of this call."""
    if call.axis.total < 2 or draws(call.op, choice.op.args, dict(choice.op.kwargs)):
        return
    if len(_FAMILIES) >= FAMILIES_KEPT:
        del _FAMILIES[next(iter(_FAMILIES))]
    family = _FAMILIES.setdefault(_key(call), [])
    family.insert(0, (choice, tuple(call.leaves.sizes)))
    del family[_FEW:]


def _key(call: PlacedCall) -> Any:
    kinds = tuple((tensor.dtype, tensor.dim()) for tensor in call.leaves.tensors)
    index_dims = iotas(call.op, call.leaves.tensors, call.axis)
    return call.op, call.leaves.template(), kinds, call.placements, call.foreign, index_dims


def _is_of(call: PlacedCall, choice: ProvenChoice, sizes: Sequence[int]) -> bool:
    values = {B.name: call.axis.total}
    expected = {**dict(enumerate(sizes)), **dict(choice.hypothesis.sizes)}
    return all(evaluate(expected[i], values) == n for i, n in enumerate(call.leaves.sizes)) and all(
        tuple(evaluate(size, values) for size in operand.type.shape) == tuple(tensor.shape)
        for operand, tensor in zip(choice.op.operands, call.leaves.tensors, strict=True)
    )


def families_kept() -> int:
    """Return the number of families that are kept now."""
    return len(_FAMILIES)
