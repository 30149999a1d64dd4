"""A skippable U-Net, data-parallel: exact on any split, and its skips known in the local program."""

from __future__ import annotations

from fxdp.compiler.planning import Planning
from fxdp.ir.graph.metadata import meta
from tests.capture.unet import UNet, unet_inputs
from tests.lockstep import check


def test_a_unet_is_exact_and_keeps_the_names_of_its_skips() -> None:
    local = check(UNet().double(), (), {k: x.double() for k, x in unet_inputs(8).items()})
    labels = [meta(node).skip for node in local.gm.graph.nodes if meta(node).skip]
    assert labels == ["long@1", "long", "long@2"]
    assert not any(row.op == "all_gather" for row in Planning(local, {"B": 8}).plan().communication)
