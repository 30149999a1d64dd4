"""Code for graphs that run op by op, not compiled by Inductor; all-reduces pack their operands.

Ops are called by torch's Python functions: `torch.ops` parses the op's schema at each call, which takes
longer than a view. Compositions of fxdp are called as Python functions. Both ways run the same kernels.

    before   torch.ops.aten.reshape.default(%x, [4, 6])     2.3 us
    after    torch.reshape(%x, [4, 6])                      0.8 us
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxdp.ir.graph.draws import draw_apart, node_draws
from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.aligned_bias import attend, attend_backward
from fxdp.ir.ops.empty_parts import UNWARNED
from fxdp.ir.ops.library import COMPOSITIONS, existing
from fxdp.ir.ops.packed_sums import start_sum
from fxdp.ir.types.value_types import TensorType
from fxdp.lowering.forward_backward_pair import Boxed
from fxdp.torch_compat import OpOverload, aten, boxed_code, graph_module

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_CAT = aten.cat.default
_SLICE = aten.slice.Tensor


def op_by_op(gm: fx.GraphModule) -> Boxed:
    """Return a function that runs a graph op by op on a list, which is emptied; `gm` stays unchanged."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    pack_sums(graph)
    _split_at_once(graph)
    _call_plainly(graph)
    _draw_apart(graph)
    return boxed_code(graph_module(gm, graph, type(gm).__name__))


def pack_sums(graph: fx.Graph, wanted: Callable[[fx.Node], bool] = lambda packed: True) -> bool:
    """Fuse a concatenation into an all-reduce if nothing else reads the concatenation; return if changed.

    `wanted` selects concatenations to fuse.

    before: `%all_reduce = all_reduce(cat([%a, %b]), sum, group)`
    after:  `%start_sum = start_sum([%a, %b], group)`
    """
    found = False
    for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE):
        value, kind, group = node.args
        if kind != "sum" or value.target is not _CAT or len(value.users) > 1 or len(value.args) > 1:
            continue
        if not wanted(value):
            continue
        found = True
        with graph.inserting_before(node):
            packed = graph.call_function(start_sum, (value.args[0], group))
        if (like := node.meta.get("val")) is not None:
            packed.meta["val"] = like
        node.replace_all_uses_with(packed)
        graph.erase_node(node)
        graph.erase_node(value)
    return found


def _split_at_once(graph: fx.Graph) -> None:
    """Split a value, such as a bucket of gradients, by one call: a sixth of the time of one slice per part.

    before: `%a = slice(%sums, 0, 0, 4)`, `%b = slice(%sums, 0, 4, 6)`
    after:  `%parts = tensor_split(%sums, [4, 6])`, `%a = %parts[0]`, `%b = %parts[1]`
    """
    fulls = dict.fromkeys(part.args[0] for part in graph.find_nodes(op="call_function", target=_SLICE))
    for full in fulls:
        parts = [user for user in full.users if user.target is _SLICE]
        ends = [part.args[3] for part in parts if len(part.args) == 4]
        # an open end is the largest integer, and so the last: that part extends to the end
        if len(parts) < 2 or not all(type(end) is int and end >= 0 for end in ends):
            continue
        if [part.args[1:] for part in parts] != [(0, start, end) for start, end in pairwise([0, *ends])]:
            continue
        with graph.inserting_before(parts[0]):
            split = graph.call_function(torch.tensor_split, (full, ends))
        for place, part in enumerate(parts):
            with graph.inserting_before(part):
                part.replace_all_uses_with(graph.call_function(getitem, (split, place)))
            graph.erase_node(part)


def _draw_apart(graph: fx.Graph) -> None:
    """Let each random op that has a number draw with a seed of its own.

    before: `%rand = rand_like(%x)`
    after:  `%rand = draw_apart(rand_like, 3, %x)`
    """
    for node in graph.nodes:
        if (number := meta(node).draw) is not None and node_draws(node):
            node.target, node.args = draw_apart, (node.target, number, *node.args)


def reads_again(packed: fx.Node) -> bool:
    """Return whether an op besides `packed` reads one of the concatenated values.

    Inductor computes the values inside the packed buffer, and lets the all-reduce overwrite the buffer. A
    later reader of a value would then find the sum.
    """
    for value in packed.all_input_nodes:
        path = packed
        while value.op == "call_function":
            if any(user is not path for user in value.users):
                return True
            if not is_view(value.target):
                break
            path, value = value, value.all_input_nodes[0]
    return False


_FUNCTIONS = (
    "reshape", "t", "transpose.int", "permute", "unsqueeze", "squeeze.dim", "select.int", "narrow",
    "unbind.int", "mm", "bmm", "addmm", "baddbmm", "mv", "add.Tensor", "sub.Tensor", "mul.Tensor",
    "div.Tensor", "neg", "exp", "log", "rsqrt", "tanh", "sigmoid", "relu", "sum.dim_IntList", "mean.dim",
    "cat", "stack", "clone", "where.self", "native_layer_norm", "embedding",
)  # fmt: skip
"""Ops with a function in `torch` that takes the same arguments."""
_METHODS = ("view", "expand", "contiguous", "detach", "add_.Tensor", "addmm_", "copy_")
"""Ops that exist only as a method of a tensor."""


def _table() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for place, names in ((torch, _FUNCTIONS), (Tensor, _METHODS), (F, ("gelu",))):
        for name in names:
            for op in existing(name):
                yield op, getattr(place, name.partition(".")[0])


_PLAIN: dict[Any, Callable[..., Any]] = dict(_table())
_ALIGNING = {
    aten._scaled_dot_product_efficient_attention.default: attend,
    aten._scaled_dot_product_efficient_attention_backward.default: attend_backward,
}
"""Attention ops whose operands need an alignment that a program's operands may lack."""


def _call_plainly(graph: fx.Graph) -> None:
    """Replace the targets of a graph's ops by functions that are faster to call."""
    for node in graph.nodes:
        op = node.target
        if isinstance(op, OpOverload):
            # generated Python cannot call `torch.ops.aten.random.from`
            node.target = op.overloadpacket if keyword.iskeyword(op._overloadname) else _plain(node)


def _plain(node: fx.Node) -> Any:
    """Return the function to call for a node; the op itself if a function does not accept the arguments."""
    if node.target in COMPOSITIONS and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        return COMPOSITIONS[node.target]
    if node.target in UNWARNED:
        return UNWARNED[node.target]
    if node.target in _ALIGNING:
        return _ALIGNING[node.target]
    found = _PLAIN.get(node.target)
    # a function accepts a number in place of a tensor only from the second operand on, an op also as the
    # first
    first = node.args[0] if node.args else None
    takes = isinstance(first, (list, tuple)) or (
        isinstance(first, fx.Node) and (is_view(node.target) or _is_tensor(first))
    )
    return found if found is not None and takes else node.target


def _is_tensor(node: fx.Node) -> bool:
    if isinstance(meta(node).type, TensorType):
        return True
    if node.op == "placeholder":
        return isinstance(node.meta.get("val"), Tensor)
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
