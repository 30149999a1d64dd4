from __future__ import annotations

import pytest
import torch

from fxdp.ir.types.placements import P, Placement, R, S
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType, type_bytes
from fxdp.placing.chooser import choose, redistribution_cost
from fxdp.rules.registry import Alternative, Op, Operand

aten = torch.ops.aten
N = 1000


@pytest.mark.parametrize(
    ("have", "want", "cost"),
    [
        ((R,), R, 0), ((S(0),), S(0), 0), ((R,), None, 0), ((P,), None, 0),
        ((R,), S(0), 0), ((R,), P, 0),
        ((P,), R, 2 * N), ((P,), S(0), N),
        ((S(0),), R, N), ((S(0),), S(1), N), ((S(0),), P, N),
        ((P, R), S(1), 0), ((P, S(0)), R, N),
    ],
)  # fmt: skip
def test_bytes_of_a_conversion(have: tuple[Placement, ...], want: Placement | None, cost: float) -> None:
    assert redistribution_cost(have, want, N) == pytest.approx(cost, abs=0.01)


def test_a_local_step_is_cheaper_than_any_byte_but_not_free() -> None:
    assert 0 < redistribution_cost((R,), S(0), N) < redistribution_cost((S(0),), R, 1)


def test_bytes_of_a_type() -> None:
    assert type_bytes(TensorType(torch.float64, (B, 3))) == 64 * 3 * 8
    assert type_bytes(TensorType(torch.bool, ())) == 1


def _op(*operands: tuple[tuple[Placement, ...], int], outputs: int = 1) -> Op:
    made = tuple(
        Operand(i, TensorType(torch.float32, (B, width)), placements)
        for i, (placements, width) in enumerate(operands)
    )
    return Op(aten.add.Tensor, made, (), made, (TensorType(torch.float32, (B, 4)),) * outputs)


def test_all_replicated_is_always_there() -> None:
    op = _op(((S(0),), 4))
    chosen, cost = choose(op, [])
    assert chosen == op.alternative() == Alternative((R,), (R,))
    assert cost == pytest.approx(64 * 4 * 4, abs=0.01)


def test_the_cheapest_wins() -> None:
    """One small operand is gathered rather than the large one."""
    op = _op(((S(0),), 100), ((S(1),), 4))
    both = [op.alternative({0: S(0), 1: S(0)}, S(0)), op.alternative({0: S(1), 1: S(1)}, S(1))]
    assert choose(op, both)[0] == both[0]
    assert choose(op, both[::-1])[0] == both[0]


def test_ties_go_to_less_work_per_rank() -> None:
    op = _op(((R, S(0)), 4))
    partial, sharded = op.alternative({0: R}, P), op.alternative({0: S(0)}, S(0))
    assert choose(op, [partial, sharded])[0] == sharded
    assert choose(op, [partial])[0] == op.alternative()


def test_an_alternative_that_reads_no_value_costs_nothing() -> None:
    op = _op(((P,), 4))
    free = op.alternative({0: None}, S(0))
    assert choose(op, [free]) == (free, 0.0)


def test_an_output_that_is_no_tensor_does_not_rank() -> None:
    op = _op(((S(0),), 4))
    free = Alternative((S(0),), (None, S(0)))
    assert choose(op, [free])[0] == free


def test_equal_offers_take_the_first() -> None:
    op = _op(((S(0),), 4))
    first, second = Alternative((S(0),), (S(0),)), Alternative((S(0),), (S(1),))
    assert choose(op, [first, second])[0] == first
