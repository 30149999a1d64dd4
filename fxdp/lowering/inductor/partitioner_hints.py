"""Corrections to the choice of saved values by torch's partitioner.

Random ops. Random numbers that the backward would draw again are saved instead: the partitioner recomputes
cheap ops, and with `torch._functorch.config.activation_memory_budget` or `aggressive_recomputation` nearly
all ops. A random op that ran again would draw different numbers. Of Inductor's own random ops only the seeds
are drawn, a few bytes, and the numbers made from seeds may well be recomputed.

Comparisons. A comparison that the backward reads is repeated in the backward, on CPU. Inductor's C++ writes a
tensor of booleans twenty times slower than the compared numbers, and reads the booleans five times slower
(AVX-512, torch 2.13: 1.00 and 0.33 ms against 0.04 and 0.05 ms for 131,072 elements). So the forward saves
the numbers, which are often saved anyway:

    before   forward saves le(%relu, 0)    backward reads %le
    after    forward saves %relu           backward reads %relu and computes le(%relu, 0)

Masks of dropout stay, because the random numbers are needed nowhere else. Comparisons of half precision with
a number other than 0 stay, too: the forward compares in float32, and the saved value may be rounded past the
number.

Weights that the forward converts to channels-last for convolutions are saved. Saved values without readers
are dropped.

Values that the forward computes for the backward alone are computed next to their operands, not after the
loss. So each layer contains the computation of its saved values, and large values of which only a smaller one
is saved are freed early.

`activation_checkpointing=[...]`. A backward reads copies of forward ops (`passes/recompute_modules.py`). The
partitioner merges equal ops, so without marks it would replace the copies by the forward's values, and save
these values:

    emitted   %h = gelu(%x)  computed     %x = mm(..)  saved      %h_1 = gelu(%x)  computed
    traced    erf, mul, add  recompute    mm           save       the same nodes as of %h

If a saved op decomposes into several ops, the last one is saved.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxdp.ir.graph.draws import draws, node_draws
from fxdp.ir.graph.graphs import ancestors, keep_ancestors
from fxdp.ir.graph.metadata import meta
from fxdp.ir.ops.full_batch_draws import is_twin
from fxdp.lowering.inductor.strides import results
from fxdp.torch_compat import aten, handing_on

_COMPARISONS = {getattr(aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne")}


_POLICIES = {"computed": CheckpointPolicy.MUST_RECOMPUTE, "saved": CheckpointPolicy.MUST_SAVE}
_POLICY, _REGION = "recompute", "ac_graph_id"


def marked(node: fx.Node, number: int) -> AbstractContextManager[None]:
    """Mark all nodes traced inside with `node`'s recompute policy; `number` (above 0) identifies `node`."""
    policy = _POLICIES.get(meta(node).recompute)
    if policy is None:
        return nullcontext()
    # one region for all recomputed nodes: values between two regions would be saved by the partitioner
    region = 0 if policy is CheckpointPolicy.MUST_RECOMPUTE else number
    return handing_on({_POLICY: policy, _REGION: region})


def save_results_alone(joint: fx.GraphModule) -> None:
    """Keep only the mark on the last traced node of each saved op; the partitioner decides on the rest."""
    last: dict[int, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.meta.get(_POLICY) is CheckpointPolicy.MUST_SAVE and node.meta.get(_REGION):
            before = last.get(node.meta[_REGION])
            if before is not None:
                del before.meta[_POLICY]
            last[node.meta[_REGION]] = node


def save_formatted_weights(joint: fx.GraphModule) -> None:
    """Save weights in the memory format of convolutions, which forward and backward read.

    The partitioner would save the parameter, which exists anyway, and convert a second time.
    """
    for node in joint.graph.nodes:
        if node.target is aten.convolution.default:
            weight = node.args[1]
            if weight.target is aten.clone.default and weight.args[0].op == "placeholder":
                weight.meta[_POLICY] = CheckpointPolicy.MUST_SAVE


def save_draws(forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int) -> None:
    """Remove random ops from `backward`, and read their results from `forward`, which saves the results.

    `first_saved` is the number of results of `forward` before the saved values.
    """
    saved: list[fx.Node] = []
    own = {node.name: node for node in forward.graph.nodes}
    for node in _drawn_values(backward.graph):
        saved.append(_in_forward(forward.graph, own, node))
        with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
            given = backward.graph.placeholder(node.name)
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
        backward.graph.erase_node(node)
        given.name = node.name
    if saved:
        values = results(forward)
        forward.graph.output_node().args = ((*values[:first_saved], *saved, *values[first_saved:]),)


def _drawn_values(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes with random results; for a tuple of results, the nodes that select from the tuple."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            picks = [user for user in node.users if user.target is operator.getitem]
            found += picks or [node]
    return found


def _in_forward(graph: fx.Graph, own: dict[str, fx.Node], node: fx.Node) -> fx.Node:
    if node.name in own:
        return own[node.name]
    source, index = node.args  # the forward does not select this result of the tuple
    assert isinstance(source, fx.Node)
    with graph.inserting_after(own[source.name]):
        made = graph.call_function(operator.getitem, (own[source.name], index))
    made.meta, made.name = dict(node.meta), node.name  # forward and backward identify a value by name
    return made


def save_compared_values(forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int) -> None:
    """Let the backward repeat comparisons on saved numbers, instead of reading saved masks.

    `first_saved` is the number of results of `forward` before the saved values. Values are identified by name
    in both graphs. The masks stay among the saved values, without readers.
    """
    values = results(forward)
    computed = {n.name: n for n in backward.graph.nodes}
    inputs = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    last = list(inputs.values())[-1:]
    for mask in values[first_saved:]:
        if not _is_comparison(mask) or mask.name not in inputs:
            continue
        value, given = mask.args[0], inputs[mask.name]
        if value.name not in inputs:
            values.append(value)
            with backward.graph.inserting_before(given):
                inputs[value.name] = read = backward.graph.placeholder(value.name)
            read.meta = dict(value.meta)
            if value.name in computed:  # recomputed so far: the partitioner saved the mask, not the value
                computed[value.name].replace_all_uses_with(read)
                backward.graph.erase_node(computed[value.name])
                read.name = value.name
        with backward.graph.inserting_after(*last):
            recompute = backward.graph.call_function(mask.target, (inputs[value.name], mask.args[1]))
        recompute.meta = dict(mask.meta)
        given.replace_all_uses_with(recompute)
    forward.graph.output_node().args = (tuple(values),)


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
    """Return whether a value is saved with lower precision than one kernel of the forward compares with."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _is_drawn(node: fx.Node) -> bool:
    """Return whether the numbers come from a generator, or from a seed by Inductor's own op."""
    return node_draws(node) or str(node.target) == "prims.inductor_random.default"


def compute_where_operands_are(forward: fx.GraphModule, first_saved: int) -> None:
    """Move calls whose results are only saved next to their operands; random ops and side effects stay.

    `first_saved` is the number of results of `forward` before the saved values.
    """
    nodes = list(forward.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    last = list(nodes)  # per position, the last node moved there
    needed = ancestors(results(forward)[:first_saved])
    for node in nodes:
        read = [place[n] for n in node.all_input_nodes if n.op == "call_function"]
        if node.op != "call_function" or node in needed or not read or node.is_impure() or node_draws(node):
            continue
        place[node] = at = max(read)
        last[at].append(node)
        last[at] = node


def save_what_is_read(
    forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int, tangents: int
) -> tuple[int, ...]:
    """Drop saved values without readers; return the position of each saved input of the backward.

    Also dropped are the forward's collectives that the partitioner repeats in the backward (kept by the
    partitioner because of side effects), with their inputs. Random ops without readers stay, because they
    advance the generator for later random ops.
    """
    keep_ancestors(backward.graph)
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    saved = placeholders[: len(placeholders) - tangents]
    # sizes stay: `8 * B` may be read as one number, but its code is written in terms of `B`
    names = [n.name for n in saved if n.users or isinstance(n.meta["val"], torch.SymInt)]
    for node in saved:
        if node.name not in names:
            backward.graph.erase_node(node)
    values = results(forward)
    read = [n for n in values[first_saved:] if n.name in names]
    forward.graph.output_node().args = ((*values[:first_saved], *read),)
    keep_ancestors(forward.graph, [n for n in forward.graph.nodes if is_twin(n.target)])
    position = {n.name: i for i, n in enumerate(read)}
    return tuple(position[name] for name in names)
