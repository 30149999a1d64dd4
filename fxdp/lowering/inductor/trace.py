"""An emitted joint graph as a function that Inductor's decompositions can be traced through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.ops import collectives
from fxdp.ir.ops.whole_draws import is_twin
from fxdp.ir.slots import Mutation
from fxdp.lowering.eager import backward_results, forward_results, results
from fxdp.lowering.inductor.memory_formats import channels_last, traces_channels_last

aten = torch.ops.aten

_TAKE_A_NUMBER = frozenset({collectives.start_all_gather, collectives.start_broadcast})
"""Their ops take a tensor and a number, which Inductor promotes to one type: bools would become int64."""


def joint_function(
    gm: fx.GraphModule, inputs: list[fx.Node], tangents: list[fx.Node], device: torch.device
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The graph as `f(primals, tangents)` whose results are outputs, mutations, unread draws, gradients.

    Where Inductor runs convolutions channels-last, their images and weights are laid out so from the start.
    Bools that are gathered or broadcast travel as bytes, as Inductor would not send them as they are.
    """
    order: list[fx.Node | None] = list(forward_results(gm.graph))
    order += [n for s, n in results(gm.graph) if isinstance(s, Mutation)]
    order += [*unread_draws(gm.graph), *backward_results(gm.graph)]
    placeholders = [*inputs, *tangents]
    lays_out = traces_channels_last(device)

    def joint(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(placeholders, [*primals, *tangents], strict=True))
        weights: dict[fx.Node, Tensor] = {}
        as_bytes: set[fx.Node] = set()
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
            if node.target in _TAKE_A_NUMBER and args[0].dtype == torch.bool:
                args = (args[0].to(torch.uint8), *args[1:])
                as_bytes.add(node)
            if is_twin(node.target):
                made = node.target(*args[:-1], drawn)
                drawn = made if isinstance(made, Tensor) else made[0]
                env[node] = made if node.users else drawn
            else:
                env[node] = node.target(*args, **kwargs)
                if not as_bytes.isdisjoint(node.all_input_nodes):
                    env[node] = env[node].to(torch.bool)
        return [None if n is None else env[n] for n in order]

    return joint


def unread_draws(graph: fx.Graph) -> list[fx.Node]:
    """The last of one device's draws if nobody reads it.

    The forward returns it, else the partitioner would drop it; draws before it are read by those after them.
    Without a backward nothing is dropped.
    """
    last = [n for n in graph.nodes if is_twin(n.target)][-1:]
    return [n for n in last if not n.users and backward_results(graph)]
