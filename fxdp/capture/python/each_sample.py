"""Apply an op to each sample by one op for all samples: by `vmap`, or by a replacement that `vmap` supports.

nonzero_static(mask[i], size=3)         the first three places of a stable sort of each row
attention(q[i:i+1], k[i:i+1], ...)      attention(q, k, ...), by one kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.torch_compat import aten

_OF_NUMBERS = {
    getattr(aten, name).Tensor: getattr(aten, name).Scalar
    for name in ("add", "sub", "rsub", "mul", "div", "remainder", "fmod", "bitwise_and", "bitwise_or")
}
"""Overloads for a number as the last operand, which `vmap` would convert to a tensor."""


def for_each(op: Callable[..., Any], dims: Sequence[int | None], args: Any, kwargs: Any) -> Any:
    """Apply an op to each sample; an operand with a dim in `dims` has a row per sample along that dim."""
    if isinstance(args[-1], (int, float)):
        op = _OF_NUMBERS.get(op, op)
    if op is aten.scaled_dot_product_attention.default and _is_attention_of_batches(dims, args):
        return _attention(args, kwargs, dims[3:])
    op = _SPELLED.get(op, op)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def one(*rows: Tensor) -> Any:
        own = dict(zip(places, rows, strict=True))
        args, kwargs = pytree.tree_unflatten([own.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return op(*args, **kwargs)

    return torch.vmap(one, in_dims=tuple(dims))(*(leaves[i] for i in places))


def _is_attention_of_batches(dims: Sequence[int | None], args: Any) -> bool:
    """Return whether each sample has queries, keys and values with batch and heads, as kernels expect."""
    return tuple(dims[:3]) == (0, 0, 0) and all(x.dim() == 5 for x in args[:3])


def _attention(args: Any, kwargs: Any, mask_dim: Sequence[int | None]) -> Tensor:
    """Compute the attention of all samples, with the samples' own batches flattened into one batch dim."""
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    own = args[0].shape[:2]
    mask = named.get("attn_mask")
    if isinstance(mask, Tensor):
        rows = mask.shape[1:] if mask_dim[0] == 0 else mask.shape
        batch = own[0] if mask_dim[0] == 0 else 1
        full = mask.reshape(batch, *[1] * (4 - len(rows)), *rows)
        named["attn_mask"] = full.expand(*own, *full.shape[2:]).flatten(0, 1)
    query, key, value = (x.flatten(0, 1) for x in args[:3])
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, **named)
    return found.view(*own, *found.shape[1:])


def _first_places(mask: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Compute `nonzero_static` by sorting, because `vmap` would process one sample after another."""
    found = mask.flatten() != 0
    order = (~found).to(torch.uint8).argsort(stable=True)[:size]
    order = torch.nn.functional.pad(order, (0, size - order.shape[0]))
    columns = []
    for length in reversed(mask.shape):
        columns.append(order % length)
        order = order // length
    places = torch.stack(columns[::-1], dim=1)
    known = torch.arange(size, device=mask.device) < found.sum()
    return torch.where(known.unsqueeze(1), places, fill_value)


def _with_row(of: Tensor, row: Tensor, dim: int, index: int) -> Tensor:
    """Compute `select_scatter` as `slice_scatter`: in torch 2.13's `vmap` the row would get no gradient."""
    start = index % of.shape[dim]
    return torch.slice_scatter(of, row.unsqueeze(dim), dim, start, start + 1)


_SPELLED: dict[Any, Callable[..., Any]] = {
    aten.nonzero_static.default: _first_places,
    aten.select_scatter.default: _with_row,
}
