"""Choose the dtype in which a model is verified, and the tolerance for each node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxdp.capture.refusals.stateful import copy_of
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.types.value_types import tensor_types

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}

_PROMOTED = {torch.float32: 1e-6, torch.complex64: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Tolerances for values that a float64 model computes through a narrower dtype."""

_OWN = {**_PROMOTED, torch.float32: 1e-5, torch.complex64: 1e-5}
"""Tolerances of models in their own dtypes."""

_EXACT = 1e-9


def widen(tree: Any) -> Any:
    """Return a copy of a structure with float64 and complex128 tensors."""
    return pytree.tree_map_only(Tensor, lambda t: _wide(t).requires_grad_(t.requires_grad), tree)


def widened(module: nn.Module) -> nn.Module:
    """Return a copy of the module in float64."""
    wide: nn.Module = copy_of(module)._apply(_wide)  # type: ignore[no-untyped-call]
    return wide


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.detach().to(torch.float64, copy=True)
    return tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype), copy=True)


def tolerances(gm: fx.GraphModule, *, own: bool) -> dict[str, float]:
    """Return the tolerance of each node, by the narrowest dtype from which the node was computed.

    1e-9 in float64. After float32 1e-6 in a model that was widened to float64, and 1e-5 in a model of its
    `own` dtypes; after float16 2e-3, after bfloat16 2e-2.
    """
    table = _OWN if own else _PROMOTED
    found: dict[str, float] = {}
    for node in gm.graph.nodes:
        inherited = (found[source.name] for source in node.all_input_nodes)
        found[node.name] = max([_EXACT, *inherited, *(table.get(d, 0.0) for d in _dtypes(node))])
    return found


def casts(gm: fx.GraphModule) -> tuple[Location, ...]:
    """Return the lines at which a float64 model computes in a narrower dtype, each line once, in order."""
    found: dict[Location, None] = {}
    for node in gm.graph.nodes:
        narrow = any(dtype in _PROMOTED for dtype in _dtypes(node))
        if node.op == "call_function" and narrow and not meta(node).backward:
            sources = [dtype for source in node.all_input_nodes for dtype in _dtypes(source)]
            if not any(dtype in _PROMOTED for dtype in sources):
                found[meta(node).location] = None
    return tuple(found)


def _dtypes(node: fx.Node) -> list[torch.dtype]:
    return [type_.dtype for type_ in tensor_types(meta(node).type)]
