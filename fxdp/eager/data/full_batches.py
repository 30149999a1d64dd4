"""A rank's part of a batch that every rank has loaded in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.loader import batch_dims_of, global_batch, global_parts
from fxdp.eager.ragged.cutting import cut_to_plain
from fxdp.eager.ragged.structure import Opened
from fxdp.errors import InputError


@dataclass(frozen=True)
class Cutting:
    """How batches are cut: the options of `data_loader`."""

    mesh: DeviceMesh | Mapping[str, int] | None
    batch_dims: Any
    block: int
    local: bool


def part_of_rank(data: Any, ranks: DataRanks, samples: BatchAxis | None, cutting: Cutting) -> Any:
    """Return this rank's part of a batch, as plain or as global tensors; all ranks must call this together.

    Parameters
    ----------
    samples : the ranks' samples; None: even ones, or by even rows of a ragged batch.

    Raises
    ------
    InputError : a tensor with another number of samples, or of which plain tensors can have no part.
    """
    opened = Opened(data, cutting.batch_dims, in_place=True)
    if opened.is_ragged:
        if cutting.local:
            return cut_to_plain(opened, ranks.even_axis, samples)
        return global_parts(opened, ranks, samples)
    tensors = [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor)]
    dims = batch_dims_of(data, cutting.batch_dims)
    if samples is None:
        total = next((t.shape[dim] for t, dim in zip(tensors, dims, strict=True) if dim is not None), 0)
        samples = ranks.even_axis(total, cutting.block)
    axis, given = samples, iter(dims)

    def part(leaf: Tensor) -> Tensor:
        dim = next(given)
        if dim is None:
            return leaf
        if leaf.shape[dim] != axis.total:
            raise InputError(
                f"a batch of {axis.total} samples has a tensor {list(leaf.shape)}; expected "
                f"{axis.total} in dim {dim}: give batch_dims= with None for tensors without a batch dim, or "
                "fxdp.Rows(...) where samples have rows of their own (nodes, tokens, boxes)"
            )
        return leaf.narrow(dim, axis.offset, axis.local)

    own = pytree.tree_map_only(Tensor, part, data)
    return own if cutting.local else global_batch(own, cutting.mesh, cutting.batch_dims)
