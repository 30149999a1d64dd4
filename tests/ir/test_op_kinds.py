"""The table of what an op is: each op once, and facts that hold on values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxdp.ir import op_kinds
from fxdp.ir.op_kinds import is_identity, is_view, keeps_values, keeps_zeros, mixes, picks
from fxdp.torch_compat import OpOverload

aten = torch.ops.aten
SQUARE = torch.arange(9.0).reshape(3, 3)
ROWS = torch.tensor([2, 0])


def test_an_op_stands_in_one_row() -> None:
    ops = [op for _, _, row in op_kinds._ROWS for op in row]
    assert len(ops) == len(set(ops))


def test_an_unknown_op_is_nothing() -> None:
    asked = (is_view, is_identity, keeps_values, keeps_zeros, picks, mixes)
    assert not any(ask(aten.exp.default) or ask(len) for ask in asked)
    assert op_kinds.linear_groups(aten.exp.default) == ()


IDENTITIES: list[tuple[OpOverload, tuple[Any, ...]]] = [
    (aten.detach.default, ()),
    (aten.alias.default, ()),
    (aten.lift_fresh_copy.default, ()),
    (aten.slice.Tensor, (0, 0, 3)),
    (aten.slice_backward.default, ([3, 3], 0, 0, 3, 1)),
    (aten.expand.default, ([3, 3],)),
]


@pytest.mark.parametrize(("op", "args"), IDENTITIES, ids=lambda v: str(v)[:30])
def test_identities_change_nothing(op: OpOverload, args: tuple[Any, ...]) -> None:
    assert is_identity(op)
    assert op(SQUARE, *args).equal(SQUARE)


def test_a_view_of_the_same_type_is_no_identity() -> None:
    assert is_view(aten.t.default)
    assert not is_identity(aten.t.default)
    assert not aten.t.default(SQUARE).equal(SQUARE)


ZEROS: list[tuple[OpOverload, tuple[Any, ...]]] = [
    (aten.mm.default, (SQUARE,)),
    (aten.mul.Tensor, (SQUARE,)),
    (aten.div.Tensor, (SQUARE + 1,)),
    (aten.sum.dim_IntList, ([0],)),
    (aten.select_backward.default, ([3, 3, 3], 0, 1)),
    (aten.slice_backward.default, ([5, 3], 0, 1, 4, 1)),
    (aten.constant_pad_nd.default, ([1, 1],)),
]


@pytest.mark.parametrize(("op", "args"), ZEROS, ids=lambda v: str(v)[:30])
def test_zeros_stay_zeros(op: OpOverload, args: tuple[Any, ...]) -> None:
    assert keeps_zeros(op)
    assert not op(torch.zeros(3, 3), *args).any()


def test_rows_that_are_picked_are_all_that_is_read() -> None:
    assert picks(aten.index_select.default)
    assert not picks(aten.scatter_add.default)
    assert aten.index_select.default(SQUARE, 0, ROWS).equal(SQUARE[ROWS])
