"""Plans without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxdp


def test_a_mesh_in_words_is_that_of_its_sizes() -> None:
    model, args = nn.Linear(4, 3), (torch.randn(3, 4),)
    plan = fxdp.plan(model, args, mesh="dp_replicate=2, dp=4")
    assert not plan.diff(fxdp.plan(model, args, mesh={"dp_replicate": 2, "dp": 4}))
    assert "on mesh(dp=16384), a batch of 49152" in str(fxdp.plan(model, args, mesh="dp=16384"))
    assert "over dp" in str(fxdp.explain(model, args, "weight", mesh="dp=4"))
    assert fxdp.verify(model, args, mesh="dp=2", splits=[2, 1]).mesh == "mesh(dp=2)"


@pytest.mark.parametrize("asks", [fxdp.plan, fxdp.explain, fxdp.verify])
def test_a_mesh_that_cannot_be_read_shows_the_grammar(asks: object) -> None:
    words = r"""mesh="2x4": got '2x4', expected axis=size(.|\n)*as in  mesh="dp=4\""""
    with pytest.raises(fxdp.MeshError, match=words):
        asks(nn.Linear(4, 3), (torch.randn(3, 4),), mesh="2x4")  # type: ignore[operator]
