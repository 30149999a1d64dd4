"""Which dim of which input is the batch: the caller's `batch_dims` spread over the tensor leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxdp.errors import InputError

_DEFAULT = object()


def resolve_batch_dims(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any = None
) -> list[int | None]:
    """The batch dim of each tensor leaf of `(args, kwargs)`, in order; None where it has none.

    `batch_dims` is None (dim 0 of every tensor with a dim), one int for all tensors, or a pytree prefix
    of `(args, kwargs)` whose leaves are an int or None. A dict in the prefix may leave keys out: they
    keep the default.
    """
    found: list[int | None] = []
    _spread(_DEFAULT if batch_dims is None else batch_dims, (args, kwargs), "", found)
    return found


def batch_size(
    leaves: Sequence[torch.Tensor], dims: Sequence[int | None], paths: Sequence[str]
) -> int | None:
    """The batch size that all inputs agree on; None where no input has a batch dim."""
    sizes = {
        path: leaf.shape[dim] for leaf, dim, path in zip(leaves, dims, paths, strict=True) if dim is not None
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise InputError(
            f"the inputs' batch sizes differ ({listed}). Every input must have the same size in its batch "
            "dim; name other dims, or None for an input without a batch dim, with batch_dims="
            f"{several_rows(sizes.values())}"
        )
    return next(iter(sizes.values()), None)


def several_rows(sizes: Iterable[int]) -> str:
    """What to do with inputs of several rows for each sample; empty where the sizes are none of such."""
    least, *others = sorted(set(sizes))
    if least < 2 or any(size % least for size in others):
        return ""
    return (
        ". An input with several rows for each sample (its queries, its patches) needs a dim for them: pass "
        "rows.unflatten(0, (batch, -1)), and flatten it in a module around the model"
    )


def _spread(prefix: Any, tree: Any, path: str, found: list[int | None]) -> None:
    """Append the batch dims of the tensors in `tree` under this part of the prefix."""
    if prefix is None or prefix is _DEFAULT or isinstance(prefix, int):
        leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
        found.extend(_leaf_dim(prefix, leaf, path) for leaf in leaves)
        return
    if isinstance(prefix, Mapping) and isinstance(tree, Mapping):
        _check_keys(prefix, tree, path)
        for key, value in tree.items():
            _spread(prefix.get(key, _DEFAULT), value, f"{path}[{key!r}]", found)
        return
    if isinstance(prefix, (tuple, list)) and isinstance(tree, (tuple, list)) and len(prefix) == len(tree):
        for index, (part, value) in enumerate(zip(prefix, tree, strict=True)):
            _spread(part, value, f"{path}[{index}]", found)
        return
    raise InputError(
        f"batch_dims{path} is {prefix!r}, which is no prefix of the inputs there ({type(tree).__name__}). "
        "Expected an int, None, or a container shaped like (args, kwargs)"
    )


def _check_keys(prefix: Mapping[Any, Any], tree: Mapping[Any, Any], path: str) -> None:
    """Refuse keys of the prefix that the inputs do not have."""
    unknown = [key for key in prefix if key not in tree]
    if unknown:
        raise InputError(f"batch_dims{path} names {unknown}, but the inputs there have {list(tree)}")


def _leaf_dim(prefix: Any, leaf: torch.Tensor, path: str) -> int | None:
    """The batch dim of one tensor, counted from the front."""
    if prefix is None or leaf.dim() == 0:
        return None
    if prefix is _DEFAULT:
        return 0
    if not -leaf.dim() <= prefix < leaf.dim():
        raise InputError(
            f"batch_dims{path} is {prefix}, but a tensor there has shape {tuple(leaf.shape)}: give it a dim "
            "of its own, or None if it has no batch dim"
        )
    dim: int = prefix % leaf.dim()
    return dim
