"""Axes born inside a program: their names, and sizes in terms of these."""

from __future__ import annotations

import sympy
import torch

from fxdp.ir.types.born_axes import concatenation, in_parts, is_born, renamed, unborn
from fxdp.ir.types.sizes import axis, batch_factor, local_size
from fxdp.ir.types.value_types import TensorType

U0 = sympy.Symbol("u0", integer=True, nonnegative=True)
SELECTED, NODES = axis("u0"), axis("nodes")


def test_a_size_of_data_becomes_an_axis() -> None:
    assert unborn(U0) == SELECTED
    assert unborn(2 * U0) is unborn(NODES.total) is unborn(3) is None
    found = renamed((TensorType(torch.bool, (4, 2 * U0)), None), SELECTED)
    assert found == (TensorType(torch.bool, (4, 2 * SELECTED.total)), None)
    assert all(is_born(axis(name)) for name in ("u0", "u12", "u0+", "edges+nodes"))
    assert not any(is_born(axis(name)) for name in ("", "nodes", "users", "u"))


def test_rows_of_two_axes_are_one_in_their_order() -> None:
    both = concatenation([SELECTED.total, NODES.total])
    assert both is not None
    assert (both.name, both.parts, both.is_contiguous) == ("u0+nodes", ("u0", "nodes"), False)
    size = 3 * SELECTED.total + 3 * NODES.total
    (made,) = renamed(TensorType(torch.bool, (size,)), both).shape  # type: ignore[union-attr]
    assert batch_factor(made) == 3
    assert sympy.expand(in_parts(sympy.sympify(local_size(made)))) == 3 * SELECTED.local + 3 * NODES.local
    other = TensorType(torch.bool, (SELECTED.total + 2 * NODES.total, NODES.total))
    assert renamed(other, both) == other


def test_no_other_sizes_are_concatenated() -> None:
    assert concatenation([NODES.total, NODES.total]) is None
    assert concatenation([NODES.total, 2 * SELECTED.total]) is None
    assert concatenation([NODES.total, 3]) is None
