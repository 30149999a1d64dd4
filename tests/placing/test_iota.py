from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxdp.placing.iota import iota_dim
from tests.graphs import Sketch

aten = torch.ops.aten


def _found(*steps: tuple[Any, ...]) -> int | None:
    """The dim after a chain of ops, each `(target, type, *arguments after the first)`."""
    g = Sketch()
    size = g.size("B")
    known: dict[fx.Node, int] = {}
    node: fx.Node | None = None
    dim = None
    for target, type_, *args in steps:
        arguments = [size if a == "B" else a for a in args]
        node = g.call(target, *([] if node is None else [node]), *arguments, type=type_)
        dim = iota_dim(node, known)
        if dim is not None:
            known[node] = dim
    return dim


COUNT = (aten.arange.default, "i64[B]", "B")


def test_arange_of_the_batch() -> None:
    assert _found(COUNT) == 0
    assert _found((aten.arange.start, "i64[B]", 0, "B")) == 0
    assert _found((aten.arange.start_step, "i64[B]", 0, "B", 1)) == 0
    assert _found((aten.arange.start_step, "i64[B]", 0, "B")) == 0


@pytest.mark.parametrize(
    "step",
    [
        (aten.arange.default, "i64[64]", 64),
        (aten.arange.start, "i64[B]", 1, "B"),
        (aten.arange.start_step, "i64[B]", 0, "B", 2),
    ],
)
def test_other_ranges_are_none(step: tuple[Any, ...]) -> None:
    assert _found(step) is None


@pytest.mark.parametrize(
    ("step", "dim"),
    [
        ((aten.clone.default, "i64[B]"), 0),
        ((aten._to_copy.default, "f32[B]"), 0),
        ((aten.unsqueeze.default, "i64[B, 1]", 1), 0),
        ((aten.unsqueeze.default, "i64[B, 1]", -1), 0),
        ((aten.unsqueeze.default, "i64[1, B]", 0), 1),
        ((aten.expand.default, "i64[3, B]", [3, -1]), 1),
        ((aten.view.default, "i64[B, 1, 1]", [-1, 1, 1]), 0),
        ((aten.reshape.default, "i64[1, B]", [1, -1]), 1),
        ((aten.slice.Tensor, "i64[B]", 0, 0, 9223372036854775807), 0),
        ((aten.slice.Tensor, "i64[B - 1]", 0, 1), None),
        ((aten._to_copy.default, "b8[B]"), None),
        ((aten._to_copy.default, "f16[B]"), None),
        ((aten.neg.default, "i64[B]"), None),
        ((aten.add.Tensor, "i64[B]", 1), None),
        ((aten.flip.default, "i64[B]", [0]), None),
    ],
)
def test_what_an_op_leaves_of_it(step: tuple[Any, ...], dim: int | None) -> None:
    assert _found(COUNT, step) == dim


def test_a_chain() -> None:
    expand = (aten.expand.default, "i64[1, B, 7]", [1, -1, 7])
    assert _found(COUNT, (aten.view.default, "i64[1, B, 1]", [1, -1, 1]), expand) == 1
    assert _found(COUNT, (aten.unsqueeze.default, "i64[B, 1]", 1), (aten.view.default, "i64[B]", [-1])) == 0
    assert _found((aten.neg.default, "i64[B]", 3)) is None


def test_a_broadcast_view_that_mixes_dims_is_none() -> None:
    two = (aten.expand.default, "i64[2, B]", [2, -1])
    assert _found(COUNT, two, (aten.view.default, "i64[2*B]", [-1])) is None
