"""Which values point to rows of their rank's own, by what becomes of these."""

from __future__ import annotations

import operator

import torch

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.placements import R, S
from fxdp.placing.pointers import pointer_of
from fxdp.rules.registry import Pointer
from tests.graphs import Sketch

aten = torch.ops.aten


def test_moved_values_point_on() -> None:
    g = Sketch()
    edges = g.add(Input(0, "edges"), "i64[2, B]", S(1))
    known = {edges: Pointer("nodes", S(1))}
    parts = g.call(aten.unbind.int, edges, type="i64[B]")
    meta(parts).type = (tensor_type(parts),) * 2
    for moved, shard in (
        (g.call(aten.select.int, edges, 0, 1, type="i64[B]"), S(0)),
        (g.call(operator.getitem, parts, 1, type="i64[B]"), S(0)),
        (g.call(aten.t.default, edges, type="i64[B, 2]"), S(0)),
        (g.call(aten.cat.default, [edges, edges], 1, type="i64[2, 2*B]"), S(1, 2)),
        (g.call(aten.clone.default, edges, type="i64[2, B]"), S(1)),
    ):
        assert pointer_of(moved, known) == Pointer("nodes", shard), moved.target


def test_what_is_computed_or_mixed_is_lost() -> None:
    g = Sketch()
    edges, others = g.add(Input(0, "edges"), "i64[2, B]", S(1)), g.add(Input(1, "others"), "i64[2, B]", S(1))
    table = g.add(Input(2, "table"), "i64[9]", R)
    known = {edges: Pointer("nodes", S(1)), others: Pointer("graphs", S(1))}
    for lost in (
        g.call(aten.add.Tensor, edges, 1, type="i64[2, B]"),
        g.call(aten.cat.default, [edges, others], 0, type="i64[4, B]"),
        g.call(aten._to_copy.default, edges, type="f32[2, B]"),
        g.call(aten.index.Tensor, table, [edges], type="i64[2, B]"),
        g.call(aten.amax.default, edges, [1], type="i64[2]"),
    ):
        assert pointer_of(lost, known) is None, lost.target
