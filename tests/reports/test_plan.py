"""Plans without a process group."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import fxdp
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.value_types import TensorType


def test_plan_of_many_ranks() -> None:
    """Sixty-four ranks in one process: the gradients' bytes are the parameters', the loss is one scalar."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = fxdp.plan(
        model, (torch.randn(5, 4),), {"target": torch.randint(3, (5,))}, {"dp": 64},
        loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    assert plan.gradient_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert [row.bytes for row in plan.communication if not row.gradient] == [8]  # the loss
    assert [row.bytes for row in plan.causes if not row.gradient] == [4, 4]  # its sum and its count
    assert {row.cause for row in plan.causes if row.gradient} == {
        f"gradient of {name}" for name, _ in model.named_parameters()
    }
    assert plan.nodes > 0
    assert "{dp=P(sum)}" in plan.text


def test_plan_of_one_rank_has_no_communication() -> None:
    plan = fxdp.plan(nn.Linear(2, 2), (torch.randn(3, 2),), mesh={"dp": 1})
    assert plan.communication == ()


def test_plan_of_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 17, 1 << 17), nn.BatchNorm1d(1 << 17))
    plan = fxdp.plan(model, (torch.empty(4, 1 << 17, device="meta"),), mesh={"dp": 8})
    assert plan.gradient_bytes == 4 * ((1 << 34) + (1 << 17))
    assert {row.by for row in plan.communication} == {""}


def _pipeline() -> fxdp.Plan:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return fxdp.plan(
        model, (torch.randn(4, 4),), {"target": torch.randint(3, (4,))}, {"pp": 2},
        loss_fn=nn.functional.cross_entropy, pipeline={"microbatches": 2, "stages": ["2"]},
    )  # fmt: skip


def test_stages_with_what_they_hold_and_send() -> None:
    plan = _pipeline()
    first, last = plan.stages
    assert (first.rank, last.rank) == (0, 1)
    assert (first.begins, last.begins) == ("0", "2")
    assert first.parameters == 4 * 8 + 8
    assert last.parameters == (8 * 8 + 8) + (8 * 3 + 3)
    assert first.share + last.share == 1
    assert first.parameter_bytes == 4 * first.parameters
    # four rows of hidden values there, of their gradients back; then each rank's gradients, and the loss
    assert first.sent == 4 * 8 * 4 + first.parameter_bytes
    assert last.sent == 4 * 8 * 4 + last.parameter_bytes + 4
    assert first.sent + last.sent == sum(row.bytes for row in plan.communication if row.op == "send")


def test_the_schedule_that_runs_as_text_and_picture() -> None:
    plan = _pipeline()
    assert_expected_inline(
        plan.timetable(),
        """\
rank 0: F0 F1 .  .  B0 B0 .  B1 B1
rank 1: .  F0 B0 B0 F1 B1 B1""",
    )
    picture = plan.schedule_svg()
    assert "1f1b: 2 stages on 2 ranks, 2 micro-batches, bubble 33.3 %" in picture
    (there,) = [e for e in plan.edges if not e.backward]
    assert f"<title>{there.name} mb1</title>" in picture


def test_a_plan_without_stages_has_no_schedule() -> None:
    plan = fxdp.plan(nn.Linear(2, 2), (torch.randn(3, 2),), mesh={"dp": 1})
    assert plan.stages == ()
    with pytest.raises(fxdp.StateError, match=r"a pp axis, or use fxdp.Pipeline\(microbatches"):
        plan.timetable()


def _graph(**options: Any) -> tuple[fxdp.Plan, dict[str, fx.Node]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = fxdp.plan(
        model, (torch.randn(6, 4),), {"target": torch.randn(6, 3)}, loss_fn=nn.functional.mse_loss, **options
    )
    return plan, {node.name: node for node in plan.graph.graph.nodes}


def test_each_placed_tensor_has_a_spec_without_a_process_group() -> None:
    _, nodes = _graph(mesh={"dp_replicate": 2, "dp": 3})
    placed = [n for n in nodes.values() if n.op != "output" and isinstance(meta(n).type, TensorType)]
    assert all(isinstance(n.meta["spec"], DTensorSpec) for n in placed)
    weight, x = nodes["_0_weight"].meta["spec"], nodes["input_1"].meta["spec"]
    assert (weight.placements, weight.shape) == ((Replicate(), Replicate()), (8, 4))
    assert (x.placements, x.shape) == ((Shard(0), Shard(0)), (36, 4))
    assert x.mesh.mesh_dim_names == ("dp_replicate", "dp")
    assert meta(nodes["input_1"]).placement == fxdp.S(0)
    (reduced,) = [n for n in placed if meta(n).cause and meta(n).cause.text == "gradient of 0.weight"]
    assert reduced.all_input_nodes[0].meta["spec"].placements == (Partial(), Partial())
    assert meta(reduced.all_input_nodes[0]).placement == fxdp.P
    assert meta(reduced).placement == fxdp.R


def test_the_graph_is_a_copy_that_shows_whole_shapes_and_the_models_code() -> None:
    plan, nodes = _graph(mesh={"pp": 2, "dp": 3}, pipeline={"microbatches": 2})
    assert plan.graph is not plan.graph
    assert list(nodes) == [node.name for node in plan.graph.graph.nodes]
    assert nodes["input_1"].meta["spec"].mesh.mesh_dim_names == ("dp",)  # not micro-batches
    shown = plan.graph.print_readable(print_output=False)
    assert 'relu: "f32[18, 8]" = torch.ops.aten.relu.default(addmm)' in shown
    assert "linear.py:" in shown
    assert "code: return F.linear(input, self.weight, self.bias)" in shown


def test_a_pickled_plan_leaves_its_graph_behind() -> None:
    plan, _ = _graph(mesh={"dp": 2})
    read = pickle.loads(pickle.dumps(plan))
    assert read == plan
    with pytest.raises(fxdp.StateError, match="leaves it behind; plan the model here"):
        _ = read.graph
