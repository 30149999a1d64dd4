"""Attend within packed samples without a mask, where the mask says nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import tensor_type
from fxdp.ir.graph.signature import Input
from fxdp.ir.ops.library import aten
from fxdp.ir.ops.sample_attention import ATTENTION, ATTENTION_BACKWARD
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import Meaning, axis
from fxdp.placing.facts import Facts

_KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (ATTENTION, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (ATTENTION_BACKWARD, 6),
}
"""The op that attends within samples for each kernel, and the number of tensors before the mask."""


@dataclass(frozen=True)
class AttendWithinSamples:
    """Replace a mask between the rows of each packed sample by the numbers of the samples.

    before: `%out = attention(%query, %key, %value, attn_mask=%mask)`, with `%mask` of `[B, B]`
    after:  `%out = sample_attention(%query, %key, %value, %numbers, True, None)`

    Other masks stay. Only graphs of ragged batches change, whose inputs say what packed samples are.
    """

    batch: tuple[int | None, ...]
    meanings: tuple[Meaning | None, ...] = ()

    name = "attend-within-samples"
    requires = Level.CAPTURED
    ensures = Level.CAPTURED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if not any(self.meanings) or not any(node.target in _KERNELS for node in gm.graph.nodes):
            return gm
        facts = Facts(self.meanings)
        for spec, node in inputs_of(gm.graph, Input):
            dim = self.batch[spec.index]
            if dim is not None:
                facts.learn_input(node, spec.index, Shard(dim))
        masks = set()
        for node in list(gm.graph.nodes):
            if node.op == "call_function":
                facts.learn(node)
            if node.target in _KERNELS and (mask := _rewritten(node, facts)) is not None:
                masks.add(mask)
        _erase_unread(gm.graph, masks)
        return gm


def _rewritten(node: fx.Node, facts: Facts) -> fx.Node | None:
    """Replace the target and arguments of attention, and return the mask that it had."""
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    mask: fx.Node | None = given.get("attn_mask")
    found = None if mask is None else facts.blocks.get(mask)
    if mask is None or found is None or found.samples is None:
        return None
    if given.get("dropout_p") or given.get("is_causal") or not _hides(found.fill, mask):
        return None
    kernel, count = _KERNELS[schema]
    tensors = list(given.values())[:count]
    last, rows = len(tensor_type(mask).shape) - 1, axis(found.axis).total
    dims = found.dims if found.samples.causal else tuple(sorted(found.dims))
    fits = all(shape[0] == 1 and shape[2] == rows for shape in (tensor_type(t).shape for t in tensors))
    if not fits or dims != (last - 1, last):
        return None
    numbers = next(n for n in node.graph.nodes if n.name == found.samples.numbers)
    node.target = kernel
    node.args, node.kwargs = (*tensors, numbers, found.samples.causal, given.get("scale")), {}
    return mask


def _hides(fill: float, mask: fx.Node) -> bool:
    return fill == (0.0 if tensor_type(mask).dtype == torch.bool else -torch.inf)


def _erase_unread(graph: fx.Graph, roots: set[fx.Node]) -> None:
    """Erase masks that nobody reads any more, with all that was computed for these alone."""
    unread = set(roots)
    for node in reversed(graph.nodes):
        if node in unread and not node.users and node.op == "call_function":
            unread.update(node.all_input_nodes)
            graph.erase_node(node)
