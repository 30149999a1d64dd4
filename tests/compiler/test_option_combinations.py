"""Meshes and batches whose blocks would have other bits than one device's; other rooms test the options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import fxdp
from fxdp.compiler.option_combinations import check_ragged_blocks, check_sharding
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options

_SHARDED = Options(numerics={"block": 2}, strategy="shard", backend="inductor")


def test_sums_along_two_data_axes_have_another_order() -> None:
    mesh = mesh_of({"dp_replicate": 2, "dp_shard": 2}, "cpu")
    with pytest.raises(fxdp.MeshError, match=r"block=2\) .*'dp_replicate', .* expected one data axis"):
        check_sharding(mesh, _SHARDED)
    check_sharding(mesh_of({"dp_shard": 4}, "cpu"), _SHARDED)


def test_inductor_fuses_blocks_of_a_ragged_batch_by_the_first() -> None:
    ragged: Any = SimpleNamespace(axes=SimpleNamespace(names=("nodes",)))
    with pytest.raises(fxdp.InputError, match=r'ragged batch .*block=2\): .* expected backend="eager"'):
        check_ragged_blocks(ragged, _SHARDED)
