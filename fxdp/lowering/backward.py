"""Transform a backward graph before compilation: prune zero tangents, split in two, accumulate into buffers.

`usual_zeros`, `without_tangents`: autograd passes no gradient for outputs that the loss does not use (logits
beside the loss), so their tangents are zero. If a zero tangent only meets linear ops and sums, the tangent is
removed from the graph and nothing is computed for it. A tangent that reaches any other op gets zeros at run
time.

`split_backward`: compute the gradients that other stages wait for first, and gradients of weights later.

    backward   %saved, %tangent -> %grad_x, %grad_w
    inputs     %saved, %tangent -> %grad_x, then all values that the second graph needs
    weights    these values     -> %grad_w

`add_to_buffers`: add some results to buffers that outlive the backward, instead of returning these results.

    before   %saved, %tangent           -> %grad_x, %grad_w = mm(t(%g), %x), %grad_b
    after    %saved, %tangent, %w, %b   -> %grad_x            with addmm_(%w, t(%g), %x) and add_(%b, %grad_b)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.graph.convolutions import gradients_apart
from fxdp.ir.graph.graphs import ancestors, copy_graph, subgraph
from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import keeps_zeros
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten, graph_module, sizes_behind


def usual_zeros(tangents: Sequence[TensorType]) -> frozenset[int]:
    """Return the tangents that a training loop leaves zero: all but scalars', or none without a scalar."""
    if all(t.shape for t in tangents):
        return frozenset()
    return frozenset(i for i, t in enumerate(tangents) if t.shape)


def without_tangents(
    gm: fx.GraphModule, zero: Sequence[int], tangents: int
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return the backward without the tangents `zero`, and the numbers of the tangents that remain.

    The last `tangents` placeholders of `gm` are the tangents. A tangent that cannot be removed remains.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = [n.name for n in placeholders[len(placeholders) - tangents :]]
    graph, dropped = gm.graph, []
    for number in zero:
        pruned = _without_one(graph, names[number])
        if pruned is not None:
            graph = pruned
            dropped.append(number)
    kept = tuple(i for i in range(tangents) if i not in dropped)
    return graph_module(gm, graph, "Backward"), kept


def _without_one(old: fx.Graph, tangent: str) -> fx.Graph | None:
    """Return a copy of the graph without one tangent; None if zeros reach an op not known to be linear."""
    graph: fx.Graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in old.nodes:
        if node.op == "placeholder" and node.name == tangent:
            zeros.add(node)
        elif not any(a in zeros for a in node.all_input_nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif _sums(node, zeros):
            copies[node] = copies[next(a for a in node.all_input_nodes if a not in zeros)]
        elif _stays_zero(node, zeros):
            zeros.add(node)
        else:
            return None
    # inputs stay: the caller passes all saved values, read or not
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or n.is_impure())
    return graph


def _sums(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Return whether the node is `add(x, 0)` with the shape and dtype of x, so that the result is x."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs:
        return False
    others = [a for a in node.all_input_nodes if a not in zeros]
    return len(others) == 1 and _type(others[0]) == _type(node)


def _stays_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is aten.add.Tensor:
        return all(a in zeros for a in node.all_input_nodes)
    # eager autograd computes nan for zero times inf or nan: only accept ops that keep finite values finite
    divides = node.target is aten.div.Tensor and node.args[1] in zeros
    return keeps_zeros(node.target) and not divides


def _type(node: fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    known = meta(node).type
    return known if isinstance(known, TensorType) else node


def split_backward(gm: fx.GraphModule, first: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a backward into two graphs; the first computes the results at the positions `first`.

    An op with several results that both graphs need is computed in the first graph. A convolution's backward
    is computed in both, once for each graph's results.
    """
    gm = _with_convolutions_apart(gm)
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    early = [results[i] for i in first]
    late = [r for i, r in enumerate(results) if i not in set(first)]
    ahead = ancestors(early)
    needed = ancestors(late)
    for node in gm.graph.nodes:  # pass tensors on, not the tuples that contain them
        if node in needed and node.target is operator.getitem and node.args[0] in ahead:
            ahead.add(node)
    handed = [
        n
        for n in gm.graph.nodes
        if n in needed
        and (n in ahead or n.op == "placeholder")
        and (n in late or any(u in needed and u not in ahead and u.op != "output" for u in n.users))
    ]
    # sizes that occur in symbolic expressions: code computes `3*s0` from `s0`
    sizes = [n for n in gm.graph.find_nodes(op="placeholder") if n not in handed]
    handed += sizes_behind([*handed, *(needed - ahead)], sizes)
    ahead |= set(gm.graph.find_nodes(op="placeholder"))  # all inputs stay: the caller passes all saved values
    return (
        subgraph(gm, ahead, [*early, *handed], "InputGradient"),
        subgraph(gm, needed - ahead, late, "WeightGradient", handed),
    )


def _with_convolutions_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that computes a convolution's gradients of input and weights by separate calls."""
    copied = copy_graph(gm)
    for node in copied.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        # a single call would delay the urgent gradient by the larger computation of the weights' gradients
        gradients_apart(node)
    return copied


def add_to_buffers(gm: fx.GraphModule, summed: Sequence[int]) -> fx.GraphModule:
    """Return a copy of a backward that adds the results numbered `summed` to buffers, its last inputs.

    The copy returns the remaining results. Buffers are contiguous. A matrix product accumulates directly into
    the buffer, so the gradient of a weight is neither stored nor read again.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(gm.graph, copies)
    assert isinstance(results, (list, tuple))
    inputs: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    buffers: list[fx.Node] = []
    for number in summed:
        last = [None, *inputs, *buffers][-1]  # after None: at the beginning
        buffers.append(_buffer_after(graph, last, number, results[number]))
    kept = tuple(r for i, r in enumerate(results) if i not in set(summed))
    times = Counter(results)  # one node can be several results, if equal ops were merged
    for buffer, number in zip(buffers, summed, strict=True):
        value = results[number]
        if value is not None:  # None means a zero gradient
            _add(buffer, value, buffers[-1], times)
    graph.output(kept)
    return graph_module(gm, graph, "Backward")


def _buffer_after(graph: fx.Graph, last: fx.Node | None, number: int, value: Any) -> fx.Node:
    with graph.inserting_after(last):
        made: fx.Node = graph.placeholder(f"buffer_{number}")
    found = None if value is None else value.meta.get("val")
    if isinstance(found, Tensor):
        made.meta["val"] = torch.empty_like(found, memory_format=torch.contiguous_format)
    return made


def _add(buffer: fx.Node, value: fx.Node, last: fx.Node, times: Counter[fx.Node]) -> None:
    """Add a value to a buffer where the value is computed; `times` counts each node among the results."""
    # with micro-batches, `addmm_` saves about a fifth of the time of such products
    graph, chain = value.graph, _transposes(value)
    product = chain[-1]
    alone = all(len(n.users) + times[n] == 1 for n in chain)
    fused = alone and product.target is aten.mm.default
    with graph.inserting_after(last if value.op == "placeholder" else product if fused else value):
        if fused:
            left, right = product.args
            made = graph.call_function(aten.addmm_.default, (buffer, left, right))
        else:
            made = graph.call_function(aten.add_.Tensor, (buffer, value))
    if "val" in buffer.meta:
        made.meta["val"] = buffer.meta["val"]
    if fused:
        for node in chain:
            graph.erase_node(node)


def _transposes(value: fx.Node) -> list[fx.Node]:
    """Return the chain from a value down through an even number of matrix transposes, which cancel."""
    found, below = [value], [value]
    while _is_transpose(below[-1]):
        below.append(below[-1].all_input_nodes[0])
        if len(below) % 2:
            found = list(below)
    return found


def _is_transpose(node: fx.Node) -> bool:
    """Return whether the node transposes a matrix."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.target is aten.transpose.int and set(node.args[1:]) in ({0, 1}, {-1, -2})
