"""What a part is given, and what it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.runtime.p2p import Microbatch
from fxdp.runtime.stage_calls import Code
from fxdp.runtime.template import CallFrame


def _as_it_lies(arguments: list[Any]) -> list[Tensor]:
    return arguments


def test_values_of_other_stages_lie_in_order() -> None:
    """Compiled code asserts it: what a stage of the same rank hands on may be channels last."""
    graph = fx.GraphModule({}, fx.Graph())
    template = CallFrame((None,), crossing=((0, "h"),), tangents=("g",))
    code = Code(ForwardBackward(_as_it_lies, 1, graph, graph), template, ("h",), ("g",))
    value = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found, _ = code.forward(Microbatch(0, (), 0), [value])
    (gradient,) = code.backward_arguments([], [value])
    for given in (found, gradient):
        assert given.is_contiguous()
        assert torch.equal(given, value)
