"""Who reads a model's tensors gets the local shard of a `DTensor`, and a plain tensor as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxdp.errors import InputError
from fxdp.ir.graph.model_tensors import is_sharded, local_of, signature_values
from fxdp.ir.graph.signature import Buffer, Constant, Output, Parameter
from fxdp.ir.types.placements import R
from fxdp.module.guards.guards import TensorGuards
from fxdp.module.model_checks import OptimizerWatch, check_model, device_type
from fxdp.oracle.one_device import input_values
from fxdp.ranks import agreement
from fxdp.ranks.agreement import model_lines
from tests.graphs import Sketch

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    file: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


@pytest.fixture
def model(mesh: DeviceMesh) -> nn.Module:
    """A layer whose weight is a DTensor, its bias is not."""
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    layer.register_buffer("scale", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return layer


def _shard(tensor: Any) -> Tensor:
    assert type(tensor) is DTensor or isinstance(tensor.data, DTensor)
    return tensor._local_tensor


def test_held(model: Any) -> None:
    assert local_of(model.bias) is model.bias
    assert local_of(model.weight) is local_of(model.weight) is _shard(model.weight)
    assert not isinstance(local_of(model.weight), DTensor)
    assert (is_sharded(model.weight), is_sharded(model.bias)) == (True, False)


def _graph() -> Any:
    g = Sketch()
    w = g.add(Parameter("weight"), "f32[4, 3]", R)
    for spec in (Parameter("bias"), Buffer("scale"), Constant("c"), Constant("rows")):
        g.add(spec, "f32[4]", R)
    return g.returns({Output(0): g.call(aten.relu.default, w, type="f32[4, 3]", at=R)})


def test_programs_are_bound_to_shards(model: Any) -> None:
    constant = torch.ones(4)
    values = signature_values(_graph().graph, model, {"c": constant})
    assert list(values) == [Parameter("weight"), Parameter("bias"), Buffer("scale"), Constant("c")]
    assert values[Parameter("weight")] is _shard(model.weight)
    assert values[Parameter("bias")] is model.bias
    assert values[Buffer("scale")] is _shard(model.scale)
    assert values[Constant("c")] is constant


def test_the_oracle_reads_shards(model: Any) -> None:
    captured: Any = SimpleNamespace(gm=_graph(), constants={"c": torch.ones(4)})
    values = input_values(model, captured, (), {})
    assert type(values[Parameter("weight")]) is Tensor
    assert type(values[Buffer("scale")]) is Tensor
    assert values[Buffer("scale")].data_ptr() != _shard(model.scale).data_ptr()  # a run writes into it


def test_a_replaced_shard_is_noticed(model: Any) -> None:
    watched = TensorGuards(model)
    assert watched.unchanged()
    assert watched.changes() == []
    _shard(model.weight).mul_(2)
    assert watched.unchanged()
    model.weight.data._local_tensor = model.weight._local_tensor = torch.zeros(4, 3)
    assert not watched.unchanged()
    assert watched.changes() == ["weight"]


@pytest.mark.parametrize("how", [lambda p: p, local_of], ids=["DTensors", "shards"])
def test_an_optimizer_may_step_on_dtensors_or_on_shards(model: Any, how: Any) -> None:
    watch = OptimizerWatch(model)
    watch._check(torch.optim.SGD([how(model.weight)]))
    assert watch.remove_when_done()


def test_ranks_compare_whole_shapes_and_exchange_shards(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_lines(model) == [
        "model Linear",
        "parameter weight float32[4, 3] as (Shard(dim=0),)",
        "parameter bias float32[4]",
        "buffer scale float32[4] as (Shard(dim=0),)",
    ]
    sent: list[Tensor] = []

    def from_rank_0(group: object, rows: list[Tensor], bucket_bytes: int) -> None:
        sent.extend(row.zero_() for row in rows)

    monkeypatch.setattr(agreement, "broadcast_coalesced", from_rank_0)
    ranks: Any = SimpleNamespace(comms=SimpleNamespace(world_group=object(), rank=1))
    agreement.broadcast_tensors(ranks, [model.weight, model.bias])
    assert type(sent[0]) is Tensor
    assert [row.numel() for row in sent] == [4 * 12, 4 * 4]
    assert not _shard(model.weight).any()
    assert not model.bias.any()


def test_a_sharded_model_is_refused_and_on_its_shards_device(model: Any) -> None:
    assert device_type(model) == "cpu"
    with pytest.raises(InputError, match=r"parameters of the model are DTensors \(weight, \.\.\.\)"):
        check_model(model)
