"""Plans without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.module.dry_run import _local_program
from fxdp.options import Options


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


class _ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, mode: str) -> Tensor:
        return self.linear(x) * (2 if mode == "twice" else 3)


def test_a_value_on_which_the_code_decides_is_a_constant_of_the_plan() -> None:
    for mode, factor in (("twice", 2), ("thrice", 3)):
        inputs = (torch.ones(4, 4), mode)
        program, _ = _local_program(_ByMode(), inputs, {}, {"dp": 2}, Options())
        assert factor in [value for node in program.gm.graph.nodes for value in node.args]
        assert "on mesh(dp=2)" in str(fxdp.plan(_ByMode(), inputs, mesh={"dp": 2}))


class _Selected(nn.Module):
    """Two runs of rows on each rank, of which the program gathers all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).t()
        rows = scores[scores > 0]
        return (rows.softmax(0) * rows).sum()


def test_rows_that_values_select_count_as_samples_in_a_plan() -> None:
    plan = fxdp.plan(_Selected(), (torch.randn(6, 4),), mesh={"dp": 2})
    (forward,) = [row for row in plan.collectives() if row.kind == "all_gather" and row.phase == "forward"]
    assert forward.type == "f32[B_u0x2]"
    assert forward.bytes == 12 * 4
