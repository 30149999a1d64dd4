"""The pure mesh: places of ranks, groups by axis and purpose, meshes far larger than this machine."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import fxdp
from fxdp.ir.types.mesh import REGATHER, Group, mesh_of


def test_a_pipeline_axis_is_no_data_axis() -> None:
    mesh = mesh_of({"pp": 2, "dp": 3}, "cpu")
    assert (mesh.size, mesh.world, mesh.axes) == (3, 6, ("dp",))
    assert mesh.pipeline.size == 2
    assert mesh.pipeline.column == (0, 3)  # the ranks of the mesh that have this rank's data
    assert mesh.pipeline.data_ranks == (0, 1, 2, 0, 1, 2)
    swapped = mesh_of({"dp": 3, "pp": 2}, "cpu")
    assert swapped.pipeline.column == (0, 1)
    assert swapped.pipeline.data_ranks == (0, 0, 1, 1, 2, 2)
    assert mesh_of({"pp": 4}, "cpu").size == 1


def test_coordinates_and_the_ranks_along_an_axis() -> None:
    mesh = mesh_of({"dp_replicate": 2, "dp": 3}, "cpu", index=5)
    assert (mesh.rank, mesh.coordinates) == (5, {"dp_replicate": 1, "dp": 2})
    assert mesh.along("dp_replicate") == ((0, 3), (1, 4), (2, 5))
    assert mesh.along("dp") == ((0, 1, 2), (3, 4, 5))
    assert mesh.along(None) == (tuple(range(6)),)
    assert [mesh.size_along(axis) for axis in ("dp_replicate", "dp", None)] == [2, 3, 6]


def test_neighbours_along_the_shard_axis_regather() -> None:
    one = replace(mesh_of({"dp_shard": 6}, "cpu", index=4), post_forward_size=3)
    assert one.along(REGATHER) == ((0, 1, 2), (3, 4, 5))
    assert (one.size_along(REGATHER), one.place_along(REGATHER), one.place_along(None)) == (3, 1, 4)
    two = replace(mesh_of({"dp_replicate": 2, "dp_shard": 4}, "cpu", index=7), post_forward_size=2)
    assert two.along(REGATHER) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (two.place_along("dp_shard"), two.place_along(REGATHER)) == (3, 1)


def test_micro_batches_are_one_more_axis() -> None:
    parts = mesh_of({"dp": 3}, "cpu", index=2).in_parts(4)
    assert (str(parts), parts.size, parts.rank) == ("mesh(dp=3, microbatch=4)", 12, 8)
    assert parts.coordinates == {"dp": 2, "microbatch": 0}


def test_groups_have_a_purpose_and_an_axis() -> None:
    plan = mesh_of({"dp_replicate": 2, "dp": 3}, "cpu")
    assert plan.group() == plan.group("messages") == plan.group(axis="dp") == ""
    groups = (Group("all"), Group("sums", "reduce"), Group("small", "messages"), Group("row", axis="dp"))
    mesh = replace(plan, groups=groups)
    assert [mesh.group(), mesh.group("reduce"), mesh.group("messages")] == ["all", "sums", "small"]
    assert mesh.group(axis="dp") == mesh.group("reduce", "dp") == "row"
    assert replace(mesh_of({"dp": 3}, "cpu"), groups=groups).group("reduce", "dp") == "sums"


def test_a_plan_for_sixteen_thousand_ranks() -> None:
    """A mesh is numbers: nobody has to be there."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    plan = fxdp.plan(model, (torch.randn(2, 8),), mesh={"dp": 16_384})
    assert plan.text.startswith("mesh(dp=16384)")
    assert plan.gradient_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert not dist.is_initialized()
