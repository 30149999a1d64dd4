"""Calls of a compiled module with global tensors: it gets this rank's parts, and gives global tensors.

out = compiled(x); loss = criterion(out, y); loss.backward()      exact, wherever the loss stands
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import resolve_batch_dims
from fxdp.capture.captured import OutputLeaf
from fxdp.errors import InputError, PlacementError
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Output
from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.ir.types.sizes import batch_factor
from fxdp.ir.types.value_types import TensorType
from fxdp.module.cache_entry import CacheEntry
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.chained_modules import GLOBAL_GRADIENT, feeds


def holds_global(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call has global tensors; costs nothing in a program that has made none."""
    eager = sys.modules.get("fxdp.eager.tensor")
    if eager is None:
        return False
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, eager.GlobalTensor) for leaf in leaves):
        return True
    from fxdp.eager.ragged.structure import is_global

    objects = (leaf for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor))
    return any(map(is_global, objects))


def has_several_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call's global tensors are sharded along axes of different sizes: it is ragged."""
    from fxdp.eager.tensor import GlobalTensor

    leaves = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor))
    return len({leaf._spec.axis.total for leaf in leaves if leaf._spec.layout.is_sharded}) > 1


def call_on_parts(
    call: Callable[..., Any],
    entry: Callable[[], CacheEntry | None],
    process_mesh: ProcessMesh,
    batch_dims: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a compiled module with this rank's parts, and return its results as global tensors.

    Parameters
    ----------
    call : the module's forward for local parts; `entry` returns the cache entry of its last call.
    batch_dims : the module's option. A plain tensor with a batch dim is equal on all ranks, and is cut.

    Raises
    ------
    InputError : the global tensors are on a different mesh than the module.
    """
    from fxdp.eager.batch_axis import BatchAxis
    from fxdp.eager.local_parts import local_part
    from fxdp.eager.tensor import GlobalTensor

    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    dims = resolve_batch_dims(args, kwargs, batch_dims)
    given = [t for t in tensors if isinstance(t, GlobalTensor)]
    ranks = given[0]._spec.axis.ranks
    if ranks.process_mesh.comms is not process_mesh.comms or ranks.mesh.sizes != process_mesh.mesh.sizes:
        raise InputError(
            f"a module compiled for {process_mesh.mesh} was called with a global tensor of {ranks.mesh}; "
            "expected one mesh: pass the module's mesh to fxdp.global_batch or fxdp.shard"
        )
    sharded = [t for t in given if t._spec.layout.is_sharded]
    if sharded:
        axis: BatchAxis = max(sharded, key=lambda t: t.nbytes)._spec.axis
    else:  # all are full: any split is as good
        total = next((t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None), 0)
        axis = ranks.even_axis(total)
    found = iter(dims)
    parts: list[Any] = []
    for leaf in leaves:
        dim = next(found) if isinstance(leaf, Tensor) else None
        if isinstance(leaf, Tensor) and dim is not None and axis.total and leaf.shape[dim] % axis.total == 0:
            leaf = local_part(leaf, axis, Shard(dim))
        elif isinstance(leaf, GlobalTensor):
            leaf = leaf.full()
        parts.append(leaf)
    local_args, local_kwargs = pytree.tree_unflatten(parts, structure)
    result = call(*local_args, **local_kwargs)
    made = entry()
    assert made is not None
    return _global_results(result, made, axis)


def _global_results(result: Any, entry: CacheEntry, axis: Any) -> Any:
    from fxdp.eager.autograd.gradients import replicated
    from fxdp.eager.local_parts import from_part

    placed = {
        spec.index: node for spec, node in results_of(entry.program.gm.graph) if isinstance(spec, Output)
    }
    leaves, structure = pytree.tree_flatten(result)
    made: list[Any] = []
    for leaf, known in zip(leaves, entry.program.captured.leaves, strict=True):
        if not isinstance(known, OutputLeaf) or not isinstance(leaf, Tensor):
            made.append(leaf)
            continue
        node = placed[known.index]
        placement: Placement = meta(node).placement or R  # type: ignore[assignment]
        if not isinstance(placement, Shard):
            made.append(replicated(leaf, axis.ranks.unit))
            continue
        if leaf.requires_grad and torch.is_grad_enabled():
            feeds(leaf)  # the gradient that comes is the global loss's
        size = _global_size(leaf, tensor_type(node), placement, axis)
        found = from_part(leaf, axis, placement, size, axis.ranks.world)
        if found.grad_fn is not None:
            setattr(found.grad_fn, GLOBAL_GRADIENT, True)
        made.append(found)
    return pytree.tree_unflatten(made, structure)


def _global_size(local: Tensor, type_: TensorType, placement: Shard, axis: Any) -> int:
    """Return the size of the sharded dim, `c * B`; a rank without samples asks another one for `c`."""
    factor = batch_factor(type_.shape[placement.dim])
    if factor is None:
        raise PlacementError(f"an output of shape {type_.shape} in {placement}; this is a bug in fxdp")
    if not isinstance(factor, int):
        own = local.shape[placement.dim] // axis.local if axis.local else 0
        if 0 not in axis.sizes:
            return own * int(axis.total)
        with axis.ranks.message("the sizes of an output"):
            factor = max(row[0] for row in axis.ranks.exchange((own,)))
    return factor * int(axis.total)
