"""The table of redistributions: ways from one placement to another, and along one axis of a mesh."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.errors import FxdpError, PlacementError
from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.redistributions import TABLE, redistribution_of
from fxdp.ir.routes import price, route
from fxdp.ir.types.mesh import Group, Mesh, mesh_of
from fxdp.ir.types.placements import MOMENTS, P, Partial, Placement, R, S
from fxdp.oracle.virtual_ranks import VirtualRanks
from fxdp.passes.emit_program import EmitProgram
from tests.graphs import Sketch


@pytest.mark.parametrize(
    ("have", "want", "names"),
    [
        (P, R, ["all_reduce"]),
        (P, S(0), ["reduce_scatter"]),
        (MOMENTS, R, ["all_reduce"]),
        (Partial("max"), S(0), ["all_reduce", "shard"]),
        (S(0), R, ["all_gather"]),
        (S(0), S(1), ["all_gather", "shard"]),
        (S(0), P, ["all_gather", "partial"]),
        (R, S(0), ["shard"]),
        (R, P, ["partial"]),
    ],
)
def test_the_way_from_one_placement_to_another(have: Placement, want: Placement, names: list[str]) -> None:
    assert [c.target.__name__ for c in route(have, want)] == names


def test_a_reduce_scatter_is_half_an_all_reduce() -> None:
    assert (price(P, R, 10, 10), price(P, S(0), 10, 10)) == (20, 10)
    assert price(S(0), R, 10, 3) == pytest.approx(3, abs=0.1)


def test_names_cannot_be_called() -> None:
    for redistribution in TABLE:
        needed = len(signature(redistribution.target).parameters) - 1  # all but the axis
        with pytest.raises(FxdpError, match=f"`{redistribution.target.__name__}` is lowered at emission"):
            redistribution.target(*range(needed))


# ---- along one axis --------------------------------------------------------------------------------------


def _mesh(index: int = 4) -> Mesh:
    groups = (Group("all"), Group("all sums", "reduce"), Group("small", "messages"))
    axes = (Group("columns", axis="dp_replicate"), Group("rows", axis="dp"))
    return replace(mesh_of({"dp_replicate": 2, "dp": 3}, "cpu", index), groups=groups + axes)


def _along(target: object, *rest: object, have: Placement = P, want: Placement = R) -> fx.GraphModule:
    """One redistribution along each axis, and along both."""
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 2]", have)
    done = []
    for axis in ("dp_replicate", "dp", None):
        node = g.call(target, x, *rest, type="f32[B, 2]", at=want, reads=(have,))
        node.kwargs = {} if axis is None else {"axis": axis}
        done.append(g.call(redistributions.wait, node, type="f32[B, 2]", at=want, reads=(want,)))
    return g.returns({Output(i): n for i, n in enumerate(done)}, (want,) * 3)


def test_emission_takes_the_group_of_the_axis() -> None:
    gm = EmitProgram().run(_along(redistributions.all_reduce, "sum"), _mesh())
    assert_expected_inline(
        graph_text(gm, {"dp_replicate": 2, "dp": 3}) + "\n",
        """\
mesh(dp_replicate=2, dp=3)
  %x: f32[B, 2] {dp_replicate=P(sum) dp=P(sum)} = input(x)
  %start_all_reduce: f32[B, 2] {dp_replicate=R dp=R} = start_all_reduce(%x, sum, columns)
  %finish: f32[B, 2] {dp_replicate=R dp=R} = finish(%start_all_reduce)
  %start_all_reduce_1: f32[B, 2] {dp_replicate=R dp=R} = start_all_reduce(%x, sum, rows)
  %finish_1: f32[B, 2] {dp_replicate=R dp=R} = finish(%start_all_reduce_1)
  %start_all_reduce_2: f32[B, 2] {dp_replicate=R dp=R} = start_all_reduce(%x, sum, all)
  %finish_2: f32[B, 2] {dp_replicate=R dp=R} = finish(%start_all_reduce_2)
  return output 0=%finish, output 1=%finish_1, output 2=%finish_2
""",
    )


def test_a_gather_along_an_axis_counts_its_ranks() -> None:
    gm = EmitProgram().run(_along(redistributions.all_gather, 0, 1, 1, have=S(0)), _mesh())
    starts = [n for n in gm.graph.nodes if n.name.startswith("start_all_gather")]
    assert [n.args[4:] for n in starts] == [(2, None, "columns"), (3, None, "rows"), (6, None, "all")]


def test_a_gather_of_uneven_parts_along_an_axis_is_refused() -> None:
    words = r"%all_gather is along dp_replicate of mesh\(dp_replicate=2, dp=3\)"
    with pytest.raises(PlacementError, match=words):
        EmitProgram(even=False).run(_along(redistributions.all_gather, 0, 1, 1, have=S(0)), _mesh())


def test_an_axis_of_one_rank_needs_nothing() -> None:
    mesh = replace(mesh_of({"dp_replicate": 1, "dp": 3}, "cpu"), groups=_mesh().groups)
    gm = EmitProgram().run(_along(redistributions.all_reduce, "sum"), mesh)
    starts = [n for n in gm.graph.nodes if n.name.startswith("start_all_reduce")]
    assert [n.args[2] for n in starts] == ["rows", "all"]


def test_the_oracle_converts_among_the_ranks_of_the_axis() -> None:
    ranks = VirtualRanks([1] * 6, {}, _mesh())
    values = [torch.tensor([float(10**rank)]) for rank in range(6)]
    found = []
    for node in _along(redistributions.all_reduce, "sum").graph.find_nodes(
        op="call_function", target=redistributions.all_reduce
    ):
        found.append([int(v) for v in ranks.redistribute(node, values, node.args[1:])])
    columns, rows, together = found
    assert columns == [1001, 10010, 100100] * 2
    assert rows == [111] * 3 + [111000] * 3
    assert together == [111111] * 6


def test_a_part_along_an_axis_is_of_its_ranks_samples() -> None:
    ranks = VirtualRanks([1, 2, 3, 1, 2, 3], {}, _mesh())
    (node,) = [n for n in _along(redistributions.shard, 0, 1, have=R, want=S(0)).graph.nodes
               if n.kwargs.get("axis") == "dp"]  # fmt: skip
    parts = ranks.redistribute(node, [torch.arange(6)] * 6, node.args[1:])
    assert [p.tolist() for p in parts] == [[0], [1, 2], [3, 4, 5]] * 2


def test_the_axis_is_printed_where_there_is_one() -> None:
    text = graph_text(_along(redistributions.all_reduce, "sum"), {"dp": 2})
    assert "all_reduce(%x, sum, axis=dp)" in text
    assert "all_reduce(%x, sum)" in text


def test_an_entry_knows_its_axis() -> None:
    nodes = _along(redistributions.all_reduce, "sum").graph.nodes
    found = [c.axis for n in nodes if (c := redistribution_of(n)) is not None]
    assert found == ["dp_replicate", "dp", None]
