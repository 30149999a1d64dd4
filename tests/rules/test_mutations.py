"""The oracle catches every wrong placement: one letter of a right alternative changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fxdp.ir.types.placements import Placement
from fxdp.ir.types.sizes import B
from fxdp.rules.registry import Alternative
from tests.rules.harness import Case, RuleError, T, case, placements_of, spelled

aten = torch.ops.aten

CASES = [
    case(aten.add.Tensor, T("B", 3), T(3)),
    case(aten.mul.Tensor, T("B", "2*B"), T("2*B")),
    case(aten.where.self, T("B", 2, dtype=torch.bool), T("B", 2), T()),
    case(aten.tanh_backward.default, T("B", 2), T("B", 2)),
    case(aten.view.default, T(3, "2*B", 2), ["6*B", 2]),
    case(aten.expand.default, T("B", 1), ["B", "B"]),
    case(aten.permute.default, T("B", 2, "B"), [2, 1, 0]),
    case(aten.repeat.default, T("B", 2), [3, 1]),
    case(aten.slice.Tensor, T("4*B", 2), 0, B, 3 * B),
    case(aten.slice_backward.default, T("B", 4), ["2*B", 4], 0, B, 2 * B, 1),
    case(aten.select_backward.default, T("B", "B"), ["B", 2, "B"], 1, 1),
    case(aten.diagonal.default, T("B", "B")),
    case(aten.triu.default, T("B", "B"), splits=((3, 1, 0, 2), (2, 4))),
    case(aten.sum.dim_IntList, T("B", "2*B"), [1]),
    case(aten.amax.default, T("B", 2, "B"), [1], True),
    case(aten._softmax_backward_data.default, T("B", 3), T("B", 3), 1, torch.float64),
    case(aten.cumsum.default, T(2, "B"), 0),
    case(aten.sort.default, T("B", 3), 1),
    case(aten.full.default, ["B", "B"], 2.0),
    case(aten.ones_like.default, T("B", 2)),
    case(aten.cat.default, [T("2*B"), T("B")]),
    case(aten.stack.default, [T("B"), T("B")], 1),
    case(aten.split.Tensor, T("3*B"), 2 * B),
]


def mutations(made: Case, alternative: Alternative) -> Iterator[Alternative]:
    """The alternative with one placement of an operand or of a result replaced by another."""
    for i, placement in enumerate(alternative.inputs):
        for other in placements_of(made.tensors[i].shape):
            if placement is not None and other != placement:
                yield replace(alternative, inputs=_with(alternative.inputs, i, other))
    for i, placement in enumerate(alternative.outputs):
        type_ = made.outputs[i]
        for other in placements_of(type_.shape) if type_ is not None else ():
            if placement is not None and other != placement:
                yield replace(alternative, outputs=_with(alternative.outputs, i, other))


def _with(placements: tuple[Placement | None, ...], i: int, other: Placement) -> tuple[Placement | None, ...]:
    return (*placements[:i], other, *placements[i + 1 :])


@pytest.mark.parametrize("made", CASES, ids=lambda made: f"{made.target} {made.args}")
def test_each_mutation_is_caught(made: Case) -> None:
    right = made.alternatives()
    spellings = {spelled(a) for a in right}
    mutants = [m for a in right for m in mutations(made, a) if spelled(m) not in spellings]
    assert len(mutants) >= 2
    assert [spelled(m) for m in mutants if _survives(made, m)] == []


def _survives(made: Case, mutant: Alternative) -> bool:
    try:
        made.verify(mutant)
    except RuleError:
        return False
    return True


def test_a_mean_is_no_sum() -> None:
    sums, means = (case(op, T("B", 2), [0]) for op in (aten.sum.dim_IntList, aten.mean.dim))
    for alternative in sums.alternatives():
        if spelled(alternative) != "P(sum) -> P(sum)":
            with pytest.raises(RuleError):
                means.verify(alternative)
