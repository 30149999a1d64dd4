"""What the forward saves for the backward, where that is not what torch's partitioner would choose.

Draws. Numbers that the backward would draw a second time are saved instead: the partitioner recomputes what
is cheap, and with `torch._functorch.config.activation_memory_budget` or `aggressive_recomputation` nearly
everything. A random op that ran again would draw other numbers; of Inductor's own the seeds are drawn, a few
bytes, and the numbers made of them may well be recomputed.

Comparisons whose result the backward reads are repeated there, on CPU. Inductor's C++ writes a tensor of
booleans twenty times slower than the numbers that were compared, and reads it five times slower (AVX-512,
torch 2.13: 1.00 and 0.33 ms against 0.04 and 0.05 ms for 131,072 elements). So the forward saves the numbers,
which it often saves anyway:

    before   forward saves le(%relu, 0)    backward reads %le
    after    forward saves %relu           backward reads %relu and computes le(%relu, 0)

Dropout's masks stay: the numbers drawn for them are needed nowhere else. So do masks of half precision, but
for those of signs: the forward computes in float32, so what it saves may lie on the other side of a number.

Weights that the forward lays out for its convolutions, and nothing that nobody reads.

What the forward computes for the backward alone is computed where its operands are, not after the loss: so
a layer is a layer with what it saves, and values of which something smaller is saved are freed early.

`recompute=`. A backward reads copies of what the forward computes (`passes/recompute_modules.py`). Equal ops
are one to the partitioner, so without marks it would take the copies for the forward's values, and save them:

    emitted   %h = gelu(%x)  computed     %x = mm(..)  saved      %h_1 = gelu(%x)  computed
    traced    erf, mul, add  recompute    mm           save       the same nodes as of %h

Of the several ops that one op becomes, the last one is saved.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxdp.ir.draws import draws, node_draws
from fxdp.ir.graphs import ancestors, keep_ancestors
from fxdp.ir.metadata import meta
from fxdp.ir.ops.full_batch_draws import is_twin
from fxdp.lowering.inductor.strides import results
from fxdp.torch_compat import aten, handing_on

_COMPARISONS = {getattr(aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne")}


_POLICIES = {"computed": CheckpointPolicy.MUST_RECOMPUTE, "saved": CheckpointPolicy.MUST_SAVE}
_POLICY, _REGION = "recompute", "ac_graph_id"


def marked(node: fx.Node, number: int) -> AbstractContextManager[None]:
    """Around the run of an emitted node: what is traced inside has its mark; `number` is its own, above 0."""
    policy = _POLICIES.get(meta(node).recompute)
    if policy is None:
        return nullcontext()
    # one region for all that is computed again: between two the partitioner would save what goes over
    region = 0 if policy is CheckpointPolicy.MUST_RECOMPUTE else number
    return handing_on({_POLICY: policy, _REGION: region})


def save_results_alone(joint: fx.GraphModule) -> None:
    """Of what one saved op was traced to, let the partitioner choose freely but for the last."""
    last: dict[int, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.meta.get(_POLICY) is CheckpointPolicy.MUST_SAVE and node.meta.get(_REGION):
            before = last.get(node.meta[_REGION])
            if before is not None:
                del before.meta[_POLICY]
            last[node.meta[_REGION]] = node


def save_formatted_weights(joint: fx.GraphModule) -> None:
    """Let the forward save the weights that it lays out for convolutions, which read them in both halves.

    The partitioner would rather save the parameter, which is there anyway, and lay it out a second time.
    """
    for node in joint.graph.nodes:
        if node.target is aten.convolution.default:
            weight = node.args[1]
            if weight.target is aten.clone.default and weight.args[0].op == "placeholder":
                weight.meta[_POLICY] = CheckpointPolicy.MUST_SAVE


def save_draws(forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int) -> None:
    """Cut the drawing nodes of `backward` and read their results from `forward`, which saves them.

    `first_saved` counts the results of `forward` before those that it saves.
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
    """The drawn values; of a tuple those that are picked."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            picks = [user for user in node.users if user.target is operator.getitem]
            found += picks or [node]
    return found


def _in_forward(graph: fx.Graph, own: dict[str, fx.Node], node: fx.Node) -> fx.Node:
    if node.name in own:
        return own[node.name]
    source, index = node.args  # a pick that the forward had no use for
    assert isinstance(source, fx.Node)
    with graph.inserting_after(own[source.name]):
        made = graph.call_function(operator.getitem, (own[source.name], index))
    made.meta, made.name = dict(node.meta), node.name  # both halves know a value by its name
    return made


def save_compared_values(forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int) -> None:
    """Let the backward compare what it reads from the forward.

    `first_saved` counts the results of `forward` before those that it saves. Both halves know a value by its
    name. The masks are still saved, though nobody reads them.
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
            if value.name in computed:  # a second time: the partitioner saved the mask, not the value
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
    """Whether the value is saved with fewer digits than the forward compares it with, in one kernel."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _is_drawn(node: fx.Node) -> bool:
    """Whether the numbers come from a generator, or from a seed by Inductor's own op."""
    return node_draws(node) or str(node.target) == "prims.inductor_random.default"


def compute_where_operands_are(forward: fx.GraphModule, first_saved: int) -> None:
    """Move calls whose results are only saved to what they read; draws and calls with effects stay.

    `first_saved` counts the results of `forward` before those that it saves.
    """
    nodes = list(forward.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    last = list(nodes)  # at each place, of what was moved there
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
    """Drop what is saved for nobody; say where each saved input of the backward stands among the rest.

    With it go collectives of the forward that the partitioner repeats in the backward, and their inputs: it
    keeps them because they have side effects. Draws that nobody reads stay, as others follow them.
    """
    keep_ancestors(backward.graph)
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    saved = placeholders[: len(placeholders) - tangents]
    # sizes stay: `8 * B` may be read as one number, whose code is then written in terms of `B`
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
