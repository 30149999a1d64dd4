from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import fxdp
from fxdp.ir.graph.dtensor_specs import _set_specs, _spec_of, data_mesh
from fxdp.ir.graph.signature import Input, Output, Parameter
from fxdp.ir.types.mesh import mesh_of
from fxdp.ir.types.placements import P, R, S
from tests.graphs import Sketch

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    file: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp"))
    dist.destroy_process_group()


def test_placements_stand_on_every_axis(mesh: DeviceMesh) -> None:
    g = Sketch()
    for at, expected in ((R, Replicate()), (P, Partial()), (S(1), Shard(1))):
        spec = _spec_of(g.call(aten.ones.default, type="f32[4, B]", at=at), mesh, {"B": 6})
        assert spec.placements == (expected, expected)
        assert spec.tensor_meta == (torch.Size([4, 6]), (6, 1), torch.float32)
        assert spec.mesh == mesh


def test_an_outer_factor_is_a_strided_shard(mesh: DeviceMesh) -> None:
    g = Sketch()
    node = g.call(aten.ones.default, type="f32[B*6]", at=S(0, 3))
    strided = _spec_of(node, mesh, {"B": 6}).placements[0]
    assert type(strided).__name__ == "_StridedShard"
    assert (strided.dim, strided.split_factor) == (0, 3)


def test_sizes_are_those_given_and_others_the_batch(mesh: DeviceMesh) -> None:
    node = Sketch().call(aten.ones.default, type="f32[B, s0]", at=S(0))
    assert _spec_of(node, mesh, {"B": 5}).shape == (5, 5)
    assert _spec_of(node, mesh, {"B": 5, "s0": 9}).shape == (5, 9)


def test_each_tensor_node_gets_its_spec(mesh: DeviceMesh) -> None:
    g = Sketch()
    size = g.size("B")
    x = g.add(Input(0, "x"), "f32[B, 2]", S(0))
    w = g.add(Parameter("w"), "f32[2]", R)
    best = g.call(aten.max.dim, x, 1, type="(f32[B], i64[B])", at=(S(0), S(0)), reads=(S(0),))
    first = g.call(operator.getitem, best, 0, type="f32[B]", at=S(0))
    unplaced = g.call(aten.relu.default, x, type="f32[B, 2]")
    gm = g.returns({Output(0): first})
    _set_specs(gm.graph, mesh, {"B": 6})
    assert [n.name for n in gm.graph.nodes if "spec" in n.meta] == ["x", "w", "max_dim", "getitem"]
    assert [s.placements[1] for s in best.meta["spec"]] == [Shard(0), Shard(0)]
    assert w.meta["spec"].is_replicated()
    assert _spec_of(size, mesh, {"B": 6}) is None
    assert _spec_of(unplaced, mesh, {"B": 6}) is None


def test_the_users_mesh_is_taken_where_it_has_the_data_axes(mesh: DeviceMesh) -> None:
    assert data_mesh(mesh_of({"dp_replicate": 1, "dp": 1}, "cpu"), mesh) is mesh
    staged = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    found = data_mesh(mesh_of({"pp": 1, "dp": 1}, "cpu"), staged)
    assert found.mesh_dim_names == ("dp",)
    assert found.get_group("dp") is not None
    paper = data_mesh(mesh_of({"pp": 2, "dp": 3}, "cpu", 4))
    assert (paper.mesh_dim_names, paper.mesh.tolist(), paper.get_coordinate()) == (("dp",), [3, 4, 5], (1,))


def _trained(mesh: DeviceMesh) -> fxdp.CompiledModule:
    compiled = fxdp.compile(nn.Linear(3, 2), mesh, backend="eager")
    compiled(torch.ones(5, 3))
    return compiled


def test_a_compiled_module_hands_its_graph_out_and_runs_on_as_before(mesh: DeviceMesh) -> None:
    compiled = _trained(mesh)
    nodes = list(compiled.graph.graph.nodes)
    assert nodes[0].meta["spec"].mesh is mesh
    assert [n.meta["spec"].shape for n in nodes if n.name == "addmm"] == [(5, 2)]
    assert [n.name for n in compiled.plan.graph.graph.nodes] == [n.name for n in nodes]
    assert not any("spec" in n.meta for n in compiled.program.graph.nodes)
    assert compiled._last_call.cache_entry is not None
    assert not any("spec" in n.meta for n in compiled._last_call.cache_entry.program.causes.graph.nodes)
