"""An emitted joint graph as a function that Inductor's decompositions can be traced through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.annotations import Mutation
from fxdp.lowering.eager import backward_results, forward_results, results
from fxdp.lowering.layouts import channels_last, traces_channels_last
from fxdp.rules.whole_draws import is_twin

aten = torch.ops.aten


def joint_function(
    gm: fx.GraphModule, inputs: list[fx.Node], tangents: list[fx.Node], device: torch.device
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The graph as `f(primals, tangents)` whose results are outputs, mutations, gradients.

    Where Inductor runs convolutions channels-last, their images and weights are laid out so from the start.
    """
    order: list[fx.Node | None] = list(forward_results(gm.graph))
    order += [n for s, n in results(gm.graph) if isinstance(s, Mutation)]
    order += backward_results(gm.graph)
    placeholders = [*inputs, *tangents]
    lays_out = traces_channels_last(device)

    def joint(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(placeholders, [*primals, *tangents], strict=True))
        weights: dict[fx.Node, Tensor] = {}
        drawn: Tensor | None = None  # one device's numbers come in one order, whatever Inductor schedules
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if lays_out and node.target is aten.convolution.default:
                weight = weights[node.args[1]] = channels_last(args[1])
                args = (channels_last(args[0]), weight, *args[2:])
            elif lays_out and node.target is aten.convolution_backward.default:
                args = (*args[:2], weights.get(node.args[2], args[2]), *args[3:])
            if is_twin(node.target):
                env[node] = node.target(*args[:-1], drawn)
                drawn = env[node] if isinstance(env[node], Tensor) else env[node][0]
            else:
                env[node] = node.target(*args, **kwargs)
        return [None if n is None else env[n] for n in order]

    return joint
