"""What is done to a backward graph before it is compiled: zeros left out, cut in two, sums into buffers.

`usual_zeros`, `without_tangents`: autograd says nothing for outputs that the loss does not use (the logits
beside the loss), so their tangents are zero. Where such a zero only meets linear ops and sums, it is taken
out of the graph, and nothing is computed for it; a tangent that reaches any other op gets zeros at run time.

`split_backward`: what other stages wait for first, the gradients of weights later.

    backward   %saved, %tangent -> %grad_x, %grad_w
    inputs     %saved, %tangent -> %grad_x, then what the other half needs
    weights    those            -> %grad_w

`add_to_buffers`: some results are added to buffers that outlive the backward, instead of being returned.

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

from fxdp.ir.convolutions import gradients_apart
from fxdp.ir.graphs import ancestors, copy_graph, subgraph
from fxdp.ir.metadata import meta
from fxdp.ir.op_kinds import keeps_zeros
from fxdp.ir.types import TensorType
from fxdp.torch_compat import aten, graph_module, sizes_behind


def usual_zeros(tangents: Sequence[TensorType]) -> frozenset[int]:
    """The tangents that a training loop leaves zero: all but the scalars', where there is a scalar."""
    if all(t.shape for t in tangents):
        return frozenset()
    return frozenset(i for i, t in enumerate(tangents) if t.shape)


def without_tangents(
    gm: fx.GraphModule, zero: Sequence[int], tangents: int
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The backward without the tangents numbered `zero`, and the numbers of those it still takes.

    The last `tangents` placeholders of `gm` are its tangents.
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
    """A copy of the graph without one tangent; None where its zeros reach an op that is not known linear."""
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
    # inputs stay: whoever calls the backward gives what was saved, read or not
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or n.is_impure())
    return graph


def _sums(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """`add(x, 0)` of x's own shape and dtype is x."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs:
        return False
    others = [a for a in node.all_input_nodes if a not in zeros]
    return len(others) == 1 and _type(others[0]) == _type(node)


def _stays_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is aten.add.Tensor:
        return all(a in zeros for a in node.all_input_nodes)
    # zero times a value that may be inf or nan is what autograd would compute as nan: keep to finite ops
    divides = node.target is aten.div.Tensor and node.args[1] in zeros
    return keeps_zeros(node.target) and not divides


def _type(node: fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    known = meta(node).type
    return known if isinstance(known, TensorType) else node


def split_backward(gm: fx.GraphModule, first: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two halves of a backward; `first` are the positions of the results that come first.

    What an op of several results computes for both halves is computed in the first; a convolution's backward
    is computed in both, each for its own results.
    """
    gm = _with_convolutions_apart(gm)
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    early = [results[i] for i in first]
    late = [r for i, r in enumerate(results) if i not in set(first)]
    ahead = ancestors(early)
    needed = ancestors(late)
    for node in gm.graph.nodes:  # tensors are handed on, not the tuples that hold them
        if node in needed and node.target is operator.getitem and node.args[0] in ahead:
            ahead.add(node)
    handed = [
        n
        for n in gm.graph.nodes
        if n in needed
        and (n in ahead or n.op == "placeholder")
        and (n in late or any(u in needed and u not in ahead and u.op != "output" for u in n.users))
    ]
    # sizes of which others are made: code says `3*s0` by `s0`
    sizes = [n for n in gm.graph.find_nodes(op="placeholder") if n not in handed]
    handed += sizes_behind([*handed, *(needed - ahead)], sizes)
    ahead |= set(gm.graph.find_nodes(op="placeholder"))  # all stay: whoever calls it gives what was saved
    return (
        subgraph(gm, ahead, [*early, *handed], "InputGradient"),
        subgraph(gm, needed - ahead, late, "WeightGradient", handed),
    )


def _with_convolutions_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy in which the gradients of a convolution's input and of its weights are calls of their own."""
    copied = copy_graph(gm)
    for node in copied.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        # one call for all three gradients would make the urgent one wait for the weights', the larger part
        gradients_apart(node)
    return copied


def add_to_buffers(gm: fx.GraphModule, summed: Sequence[int]) -> fx.GraphModule:
    """A copy of a backward that takes a buffer per result numbered `summed`, after its other inputs.

    It returns its other results. The buffers are contiguous. A product goes into its buffer while it is
    computed: the gradient of a weight is neither stored nor read again.
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
    times = Counter(results)  # one node can be several results, where equal ops were made one
    for buffer, number in zip(buffers, summed, strict=True):
        value = results[number]
        if value is not None:  # None is a zero
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
    """Add the value to the buffer where it is computed; `times` it is one of the results."""
    # over micro-batches `addmm_` saves about a fifth of the time of such products
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
    """The value, and under an even number of transposes of a matrix what they leave as it is."""
    found, below = [value], [value]
    while _is_transpose(below[-1]):
        below.append(below[-1].all_input_nodes[0])
        if len(below) % 2:
            found = list(below)
    return found


def _is_transpose(node: fx.Node) -> bool:
    """Whether the node swaps the two dims of a matrix."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.target is aten.transpose.int and set(node.args[1:]) in ({0, 1}, {-1, -2})
