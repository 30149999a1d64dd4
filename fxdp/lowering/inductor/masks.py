"""Comparisons whose result the backward reads are repeated there, on CPU.

Inductor's C++ writes a tensor of booleans twenty times slower than the numbers that were compared, and reads
it five times slower (AVX-512, torch 2.13: 1.00 and 0.33 ms against 0.04 and 0.05 ms for 131,072 elements).
So the forward saves the numbers, which it often saves anyway:

    before   forward saves le(%relu, 0)    backward reads %le
    after    forward saves %relu           backward reads %relu and computes le(%relu, 0)

Dropout's masks stay: the numbers drawn for them are needed nowhere else. So do masks of half precision, but
for those of signs: the forward computes in float32, so what it saves may lie on the other side of a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxdp.ir.draws import node_draws

aten = torch.ops.aten

_COMPARISONS = {getattr(aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne")}


def save_compared_values(forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int) -> None:
    """Let the backward compare what it reads from the forward.

    `first_saved` counts the results of `forward` before those that it saves. Both halves know a value by its
    name. The masks are still saved, though nobody reads them.
    """
    output = forward.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    computed = {n.name: n for n in backward.graph.nodes}
    inputs = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    last = list(inputs.values())[-1:]
    for mask in results[first_saved:]:
        if not _is_comparison(mask) or mask.name not in inputs:
            continue
        value, given = mask.args[0], inputs[mask.name]
        if value.name not in inputs:
            results.append(value)
            with backward.graph.inserting_before(given):
                inputs[value.name] = read = backward.graph.placeholder(value.name)
            read.meta = dict(value.meta)
            if value.name in computed:  # a second time: the partitioner saved the mask, not the value
                computed[value.name].replace_all_uses_with(read)
                backward.graph.erase_node(computed[value.name])
                read.name = value.name
        with backward.graph.inserting_after(*last):
            again = backward.graph.call_function(mask.target, (inputs[value.name], mask.args[1]))
        again.meta = dict(mask.meta)
        given.replace_all_uses_with(again)
    output.args = (tuple(results),)


def _is_comparison(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target in _COMPARISONS
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[1], (int, float))
        and not _is_drawn(node.args[0])
        and not (node.args[1] != 0 and _is_rounded(node.args[0]))
    )


def _is_rounded(node: fx.Node) -> bool:
    """Whether the value is saved with fewer digits than the forward compares it with, in one kernel."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _is_drawn(node: fx.Node) -> bool:
    """Whether the numbers come from a generator, or from a seed by Inductor's own op."""
    return node_draws(node) or str(node.target) == "prims.inductor_random.default"
