"""Ops whose kernels may give other bits of equal operands, where `fxdp.Bitwise` promises equal bits.

on CUDA      ops that torch lists under `torch.use_deterministic_algorithms` as without a deterministic kernel
anywhere     ops of libraries and users, of which nothing is known: their bits are compared in the first call
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxdp.errors import InputError, StageError
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.value_types import tensor_types
from fxdp.torch_compat import OpOverload

ATOMIC_ON_CUDA = frozenset({
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "_ctc_loss_backward",
    "_embedding_bag_per_sample_weights_backward", "adaptive_max_pool2d_backward", "avg_pool3d_backward",
    "cumsum", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "histc", "kthvalue",
    "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d", "nll_loss2d_forward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
    "upsample_bicubic2d_backward", "upsample_bilinear2d_backward", "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
})  # fmt: skip
"""Ops of aten for which torch raises on CUDA while deterministic algorithms are asked for."""

_KNOWN = frozenset({"aten", "prims", "fxdp", "_c10d_functional", "higher_order"})
"""Namespaces of ops whose kernels on CPUs have the same bits each time."""


def check_kernels(graph: fx.Graph, device_type: str, block: int) -> None:
    """Refuse a model that CUDA would compute by kernels with atomic adds.

    Raises
    ------
    InputError : deterministic algorithms are not asked for.
    StageError : names the ops without a deterministic kernel, with their lines.
    """
    if device_type != "cuda":
        return
    if not torch.are_deterministic_algorithms_enabled():
        raise InputError(
            f"fxdp.Bitwise(block={block}) on CUDA needs deterministic kernels; expected "
            "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8 on all ranks"
        )
    lines = _lines(node for node in graph.nodes if _is_atomic(node))
    if lines:
        listing = "\n  ".join(lines)
        raise StageError(
            f"fxdp.Bitwise(block={block}): torch has no deterministic kernel on CUDA for these ops:\n  "
            f"{listing}\nUse other ops, or numerics='exact', which is equal up to rounding"
        )


def unknown_kernels(graph: fx.Graph) -> tuple[str, ...]:
    """Return a line for each op of a library or a user, of whose kernel nothing is known."""
    ops = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    return _lines(node for node in ops if node.target.namespace not in _KNOWN)


def _is_atomic(node: fx.Node) -> bool:
    """Return whether CUDA adds up real numbers of this op in no fixed order."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    dtypes = [type_.dtype for type_ in tensor_types(meta(node).type)]
    real = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return real and target.overloadpacket.__name__ in ATOMIC_ON_CUDA


def _lines(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"at {meta(n).location}: {target_text(n.target)}" for n in nodes))
