from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import map_arg

from fxdp.compiler.verifier import verify
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Output, StageValue
from fxdp.ir.ops import collectives
from fxdp.ir.types.placements import P, R
from fxdp.passes.sum_by_tree import SumByTree
from tests.graphs import Sketch, mesh

aten = torch.ops.aten


def _finish() -> fx.GraphModule:
    """The end of a step: a gradient and a loss, summed in one message."""
    g = Sketch()
    mm, loss = (g.add(StageValue(n), type_, P) for n, type_ in (("mm", "f32[2, 3]"), ("loss", "f32[]")))
    flat = g.call(aten.reshape.default, mm, [6], type="f32[6]", at=P, reads=(P,), name="flat")
    one = g.call(aten.reshape.default, loss, [1], type="f32[1]", at=P, reads=(P,), name="one")
    both = g.call(aten.cat.default, [flat, one], type="f32[7]", at=P, reads=(P, P), name="both")
    start = g.call(
        collectives.start_all_reduce, both, "sum", "", type="f32[7]", at=R, reads=(P,), name="start"
    )
    done = g.call(collectives.finish, start, type="f32[7]", at=R, reads=(R,), name="done")
    return g.returns({Output(0): done}, (R,))


def _lines(gm: fx.GraphModule) -> list[str]:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return [f"{n.name} = {n.target.__name__}{map_arg(n.args[:1], lambda a: a)}" for n in calls]


def test_a_rank_with_two_roots() -> None:
    """Of blocks 0 to 2 on the first of two ranks, nodes (1, 0) and (0, 2) have no sibling there."""
    gm = SumByTree((6, 4), 2).run(_finish(), mesh(2))
    verify(gm, Level.EMITTED, "sum-by-tree")
    assert _lines(gm) == [
        "getitem = getitem(mm,)",
        "getitem_1 = getitem(mm,)",
        "getitem_2 = getitem(loss,)",
        "getitem_3 = getitem(loss,)",
        "flat_1 = reshape.default(getitem,)",
        "flat_2 = reshape.default(getitem_1,)",
        "one_1 = reshape.default(getitem_2,)",
        "one_2 = reshape.default(getitem_3,)",
        "both_1 = cat.default([flat_1, one_1],)",
        "both_2 = cat.default([flat_2, one_2],)",
        "start = start_tree_sum([both_1, both_2],)",
        "done = finish_tree_sum(start,)",
    ]
    roots = next(n for n in gm.graph.nodes if n.name == "start").args[1]
    assert roots == ((((1, 0), (0, 2)), ((0, 3), (2, 1))), 0, 5)
    assert all(meta(n).type is not None for n in gm.graph.nodes if n.op == "call_function")


def test_a_rank_without_blocks_passes_one_value_that_is_not_counted() -> None:
    gm = SumByTree((0, 4), 2).run(_finish(), mesh(2))
    start = next(n for n in gm.graph.nodes if n.name == "start")
    assert len(start.args[0]) == 1
    assert start.args[1].own == ()


def test_one_rank_has_the_sum() -> None:
    gm = _finish()
    before = _lines(gm)
    assert _lines(SumByTree((10,), 2).run(gm, mesh(1))) == before
