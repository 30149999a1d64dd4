"""Small sums of fixed size go by messages on CPU, everything else by the process group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxdp
from fxdp.ir import redistributions
from fxdp.ir.graph.signature import Input
from fxdp.ir.network.transports import MESSAGE_BYTES, transport_name, transport_of
from fxdp.ir.types.mesh import mesh_of
from fxdp.ir.types.placements import P, R, S
from fxdp.ranks.comms import live_comms
from tests.graphs import Sketch
from tests.rank_pool import RankPool

LARGEST = MESSAGE_BYTES // 4


@pytest.mark.parametrize(
    ("type_", "ranks", "device", "way"),
    [
        (f"f32[{LARGEST}]", 2, "cpu", "messages"),
        (f"f32[{LARGEST + 1}]", 2, "cpu", "group"),
        (f"f64[{LARGEST}]", 2, "cpu", "group"),
        (f"f32[{LARGEST // 7}]", 8, "cpu", "messages"),
        (f"f32[{LARGEST // 7 + 1}]", 8, "cpu", "group"),
        (f"f32[{LARGEST // 17}]", 10_000, "cpu", "messages"),
        (f"f32[{LARGEST // 17 + 1}]", 10_000, "cpu", "group"),
        ("f32[8]", 2, "cuda", "group"),
        ("f32[B]", 2, "cpu", "group"),
    ],
)
def test_way_of_a_sum(type_: str, ranks: int, device: str, way: str) -> None:
    """By the bytes that one rank sends: the value to each other rank, or to those beside it in a tree."""
    g = Sketch()
    value = g.add(Input(0, "x"), type_, P)
    node = g.call(redistributions.all_reduce, value, "sum", type=type_, at=R, reads=(P,))
    mesh = mesh_of({"dp": ranks}, device)
    assert transport_of(node, mesh) == way
    large = way == "group" and device == "cpu" and "B" not in type_
    assert transport_of(node, replace(mesh, shared_memory=True)) == ("memory" if large else way)
    over_hosts = replace(mesh, host_sums=True)
    assert transport_of(node, over_hosts) == ("hosts" if large else way)
    assert transport_name(node, over_hosts) == ("memory and gloo" if large else transport_name(node, mesh))
    assert transport_name(node, mesh) == ({"cpu": "gloo", "cuda": "nccl"}[device] if way == "group" else way)


@pytest.mark.parametrize(
    ("ranks", "width", "way"), [(18, 512, "messages"), (40, 512, "group"), (40, 256, "messages")]
)
def test_way_of_moments(ranks: int, width: int, way: str) -> None:
    """They are gathered: in a tree, too, a rank sends and gets those of all."""
    g = Sketch()
    type_ = f"f32[3, {width}]"
    value = g.add(Input(0, "x"), type_, P)
    node = g.call(redistributions.all_reduce, value, "moments", type=type_, at=R, reads=(P,))
    mesh = mesh_of({"dp": ranks}, "cpu")
    assert transport_of(node, mesh) == transport_of(node, replace(mesh, shared_memory=True)) == way


def test_gathers_go_by_the_group() -> None:
    g = Sketch()
    part = g.add(Input(0, "x"), "f32[B]", S(0))
    gather = g.call(redistributions.all_gather, part, 0, 1, 1, type="f32[B]", at=R, reads=(S(0),))
    assert transport_of(gather, mesh_of({"dp": 2}, "cpu")) == "group"


def _handed_and_planned() -> tuple[int, int, set[str]]:
    """Bytes of a step by messages and memory, those that the plan says, and the forward's carriers."""
    model = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300))
    compiled = fxdp.compile(model, loss_fn=nn.functional.cross_entropy, backend="eager")
    (comms,) = live_comms()
    for _ in range(2):  # the first call compiles
        before = comms.transport.handed_bytes
        x, y = torch.randn(3 + dist.get_rank(), 6), torch.zeros(3 + dist.get_rank(), dtype=torch.long)
        compiled(x, target=y).backward()
    rows = compiled.plan.communication
    planned = sum(row.bytes for row in rows if row.by != "gloo")
    assert {row.by for row in rows if row.gradient} == {"memory"}
    return comms.transport.handed_bytes - before, planned, {r.by for r in rows if r.phase == "forward"}


def test_the_plan_says_what_goes_by_messages_and_memory(ranks: RankPool) -> None:
    for handed, planned, forward in ranks.run(2, _handed_and_planned):
        assert handed == planned > 3 * 300 * 4
        assert forward == {"messages"}
