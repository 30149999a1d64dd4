"""Call ops of a graph by torch's Python functions instead of `torch.ops`.

`torch.ops` parses the op's schema at each call, which takes longer than a view:

    before   torch.ops.aten.reshape.default(%x, [4, 6])     2.3 us
    after    torch.reshape(%x, [4, 6])                      0.8 us

Compositions of fxdp are called as Python functions. Both ways run the same kernels.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.aligned_bias import attend, attend_backward
from fxdp.ir.ops.empty_parts import UNWARNED
from fxdp.ir.ops.library import COMPOSITIONS, aten, existing
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import OpOverload

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


def call_plainly(graph: fx.Graph) -> None:
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
