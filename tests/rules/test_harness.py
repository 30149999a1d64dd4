"""The harness itself: right rules pass, and each kind of wrong rule is caught."""

from __future__ import annotations

import pytest
import torch

from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import P, Placement, R, S
from fxdp.ir.types.sizes import B
from fxdp.rules.registry import Alternative
from tests.rules.harness import Case, RuleError, T, case, placements_of, shown, spelled

aten = torch.ops.aten
MM = case(aten.mm.default, T("B", 3), T(3, 4))
WEIGHT_GRAD = case(aten.mm.default, T(3, "B"), T("B", 4))


def test_output_shapes_are_fitted() -> None:
    assert MM.outputs[0] is not None
    assert MM.outputs[0].shape == (B, 4)
    square = case(aten.view.default, T("B", "B"), [B * B])
    assert square.outputs[0] is not None
    assert square.outputs[0].shape == (B**2,)


def test_placements_of_a_shape() -> None:
    assert [str(p) for p in placements_of((2 * B, 3, B + 1))] == ["R", "P(sum)", "S(0)", "S(0, 2)"]


RIGHT: list[tuple[Case, tuple[Placement, ...], Placement]] = [
    (MM, (S(0), R), S(0)),
    (MM, (P, R), P),
    (WEIGHT_GRAD, (S(1), S(0)), P),
]


@pytest.mark.parametrize(("made", "inputs", "output"), RIGHT, ids=shown)
def test_right_alternatives_pass(made: Case, inputs: tuple[Placement, ...], output: Placement) -> None:
    made.verify(Alternative(inputs, (output,)))


WRONG: list[tuple[Case, tuple[Placement, ...], Placement]] = [
    (MM, (S(0), R), R),
    (MM, (S(0), R), P),
    (MM, (P, P), P),
    (MM, (P, R), R),
    (MM, (S(1), R), S(0)),  # no batch dim
    (WEIGHT_GRAD, (S(1), S(0)), R),
    (WEIGHT_GRAD, (S(1), R), P),
    (case(aten.add.Tensor, T("B"), 1.0), (P,), P),
    (case(aten.mean.dim, T("B", 2), [0]), (S(0),), P),
    (case(aten.amax.default, T("B", 2), [0]), (S(0),), R),
    (case(aten.cumsum.default, T("B", 2), 0), (S(0),), S(0)),
    (case(aten.view.default, T(2, "B"), ["2*B"]), (S(1),), S(0)),  # is S(0, 2)
    (case(aten.cat.default, [T("B"), T("B")]), (S(0), S(0)), S(0)),
]


@pytest.mark.parametrize(("made", "inputs", "output"), WRONG, ids=shown)
def test_wrong_alternatives_are_caught(made: Case, inputs: tuple[Placement, ...], output: Placement) -> None:
    with pytest.raises(RuleError):
        made.verify(Alternative(inputs, (output,)))


def test_a_forgotten_rewrite_is_caught() -> None:
    half = case(aten.slice.Tensor, T("2*B", 3), 0, 0, B)
    right = Alternative((S(0, 2),), (S(0),), Rewrite(local=("end",)))
    half.verify(right)
    with pytest.raises(RuleError):
        half.verify(Alternative(right.inputs, right.outputs))


def test_minus_offset() -> None:
    rows = case(aten.index_select.default, T("B", 3), 0, T("B", dtype=torch.int64, iota=0))
    rows.verify(Alternative((S(0), S(0)), (S(0),), Rewrite(minus_offset=(1,))))
    with pytest.raises(RuleError):
        rows.verify(Alternative((S(0), S(0)), (S(0),)))


def test_an_input_of_none_is_tried_in_every_placement() -> None:
    case(aten.new_zeros.default, T("B", 3), ["B", 2]).verify(Alternative((None,), (S(0),)))
    with pytest.raises(RuleError):
        case(aten.clone.default, T("B", 3)).verify(Alternative((None,), (S(0),)))


def test_spelling() -> None:
    assert spelled(Alternative((S(0, 2), None), (P, None))) == "S(0, 2), * -> P(sum), -"
