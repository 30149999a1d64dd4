"""Values that parts pass to one another in the memory format of convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxdp.ir.graph.signature import Output, StageValue
from fxdp.ir.types.placements import S
from fxdp.lowering.inductor.strides import traces_channels_last
from fxdp.runtime.template import CallFrame
from tests.graphs import Sketch
from tests.pipeline.cut.cuts import program


class Norms(nn.Module):
    """Two convolutions with BatchNorm, a mean over pixels, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        pictures = self.norm(self.b(self.norm(self.a(x)).relu())).relu()
        return self.head(pictures.mean((2, 3))).square().sum(1).mean()


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_what_blocks_keep_of_convolutions_lies_channels_last_where_it_is_compiled(backend: str) -> None:
    made = program(Norms(), torch.randn(8, 3, 8, 8), dp=2, numerics={"block": 2}, backend=backend)
    read = {spec.name for one in made.partition.in_rounds for spec in one.part.reads}
    images = read & made.images
    if backend == "eager" or not traces_channels_last(torch.device("cpu")):
        assert not images
    else:  # of forward and backward; not the statistics, which have four dims, too
        names = {name.rstrip("_0123456789") for name in images}
        assert names == {"convolution", "relu", "threshold_backward", "mul"}
        assert {"moments", "view", "wait"} <= {name.rstrip("_0123456789") for name in read - images}


def test_an_image_enters_a_part_as_it_lies() -> None:
    g = Sketch()
    x, y = (g.add(StageValue(name), "f32[B, 3, 4, 5]", S(0)) for name in "xy")
    template = CallFrame.of(g.returns({Output(0): x, Output(1): y}), {}, frozenset({"x"}))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    first, second = template.filled((), crossing={"x": image, "y": image})
    assert first is image
    assert second.is_contiguous()
    first, second = template.filled((), crossing={"x": second, "y": second})
    assert first.is_contiguous(memory_format=torch.channels_last)
