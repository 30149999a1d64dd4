"""`batch_dims=`: the batch dim of each input, and the number of rows that form one sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxdp.capture.columns import is_columns, rows_and_tensors, split
from fxdp.capture.graph_objects import contents
from fxdp.capture.input_axes import ONE_AXIS, SAMPLES, InputAxes
from fxdp.capture.leaves import register_containers
from fxdp.capture.ragged_rows import Rows, has_rows
from fxdp.errors import InputError


@dataclass(frozen=True, slots=True)
class RowsPerSample:
    """A leaf of `batch_dims`: `count` consecutive rows of an input form one sample and stay on one rank.

    `RowsPerSample(4)` is for four answers to a prompt or four views of an image, which `x.view(-1, 4)` puts
    together: the number of rows on each rank is a multiple of 4. Inputs with one row per sample may be mixed
    with inputs with several.

    Raises
    ------
    InputError : `count` is not a positive integer, or `dim` is not an integer.
    """

    count: int
    dim: int = 0

    def __post_init__(self) -> None:
        """Raise if `count` or `dim` is out of range."""
        for name, value, least in (("count", self.count, 1), ("dim", self.dim, -64)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"RowsPerSample: {name} is {value!r}, expected an integer of at least {least}"
                )


LEFT_OUT = object()
"""Placeholder for the value of a key that a prefix omits."""


def spread_prefix(
    prefix: Any, tree: Any, name: str, kinds: type | tuple[type, ...], words: str, path: str = ""
) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield for each tensor of a tree the value from a pytree prefix, with the path of the value.

      prefix ((0, None), {"mask": 1})     tree ((x, [y, z]), {"mask": m})     0 of x, None of y and z, 1 of m

    `name` is the prefix's name in errors. Leaves of the prefix are None or of one of the classes `kinds`,
    which `words` describes in errors. A dict in the prefix may omit keys: tensors below omitted keys get
    `LEFT_OUT`; it may stand for a graph of torch_geometric, too.

    Raises
    ------
    InputError : the prefix does not fit the inputs.
    """
    if prefix is None or prefix is LEFT_OUT or isinstance(prefix, kinds):
        for leaf in pytree.tree_leaves(tree, is_leaf=is_columns):
            yield from ((path, rows, tensor) for rows, tensor in rows_and_tensors(prefix, leaf))
        return
    if isinstance(prefix, Mapping) and not isinstance(tree, Mapping):
        tree = contents(tree) or tree
    if isinstance(prefix, Mapping) and isinstance(tree, Mapping):
        unknown = [key for key in prefix if key not in tree]
        if unknown:
            raise InputError(f"{name}{path} names {unknown}, but the inputs there have {list(tree)}")
        for key, value in tree.items():
            part = prefix.get(key, LEFT_OUT)
            yield from spread_prefix(part, value, name, kinds, words, f"{path}[{key!r}]")
    elif isinstance(prefix, (tuple, list)) and isinstance(tree, (tuple, list)) and len(prefix) == len(tree):
        for index, (part, value) in enumerate(zip(prefix, tree, strict=True)):
            yield from spread_prefix(part, value, name, kinds, words, f"{path}[{index}]")
    else:
        raise InputError(
            f"{name}{path} is {prefix!r}, which is no prefix of the inputs there ({type(tree).__name__}). "
            f"Expected {words}, None, or a container shaped like (args, kwargs)"
        )


def spread_dims(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dims: Any
) -> list[tuple[str, Any, torch.Tensor]]:
    """Return each tensor of `(args, kwargs)` with its part of `batch_dims` and its path there."""
    prefix = LEFT_OUT if batch_dims is None else batch_dims
    kinds, words = (int, RowsPerSample, Rows), "an int, fxdp.RowsPerSample(...)"
    return list(spread_prefix(prefix, (args, kwargs), "batch_dims", kinds, words))


def resolve_batch_dims(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any = None
) -> list[int | None]:
    """Return the batch dim of each tensor leaf of `(args, kwargs)`, in order; None for a leaf without one.

    `batch_dims` is None (dim 0 of every tensor with a dim), one int for all tensors, or a pytree prefix of
    `(args, kwargs)` whose leaves are an int, `RowsPerSample` or None. A dict in the prefix may omit keys,
    which keep the default.
    """
    rows = spread_dims(args, kwargs, batch_dims)
    for path, given, _ in rows:
        if isinstance(given, Rows):
            raise InputError(
                f"batch_dims{path} is {given} of a ragged batch, but all inputs have one axis here; expected "
                "plain tensors of this rank in a call of fxdp.compile's module, or fallback='eager'"
            )
    return [_leaf_dim(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class BatchDims:
    """What `batch_dims=` says about each tensor of a call.

    Attributes
    ----------
    dims : the batch dim; None for a tensor without one.
    rows : the number of rows in the batch dim that form one sample.
    axes : the batch axis of each tensor, if the call is ragged.
    """

    dims: tuple[int | None, ...]
    rows: tuple[int, ...]
    axes: InputAxes


def read_batch_dims(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any, paths: Sequence[str]
) -> BatchDims:
    """Read `batch_dims`, as in `resolve_batch_dims` or with `Rows`; errors name tensors by `paths`.

    Raises
    ------
    InputError : `batch_dims` do not fit; descriptions that no program has yet, or of an unknown axis.
    """
    given = spread_dims(args, kwargs, batch_dims)
    dims = tuple(_leaf_dim(*row) for row in given)
    rows = tuple(value.count if isinstance(value, RowsPerSample) else 1 for _, value, _ in given)
    if not has_rows(batch_dims):
        return BatchDims(dims, rows, ONE_AXIS)
    described = (
        value if isinstance(value, Rows) or dim is None else Rows(SAMPLES, dim)
        for (_, value, _), dim in zip(given, dims, strict=True)
    )
    return BatchDims(dims, rows, InputAxes.of(tuple(described), paths))


def has_columns(batch_dims: Any) -> bool:
    """Return whether values of a tensor point into several axes."""
    rows = (leaf for leaf in pytree.tree_leaves(batch_dims) if isinstance(leaf, Rows))
    return any(isinstance(one.into, tuple) for one in rows)


def by_axis(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs with columns in the place of tensors whose values point into several axes."""
    if not has_columns(batch_dims):
        return args, kwargs
    register_containers((args, kwargs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = iter(spread_dims(args, kwargs, batch_dims))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            path, rows, _ = next(given)
            leaves[i] = split(rows, leaf, path)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def by_sample(tensor: torch.Tensor, dim: int | None, rows: int, name: str) -> torch.Tensor:
    """Return a view of the tensor with rows grouped by sample: `[12, ...]` becomes `[3, 4, ...]`.

    Raises
    ------
    InputError : the number of rows is not a multiple of `rows`.
    """
    if dim is None or rows == 1:
        return tensor
    size = tensor.shape[dim]
    if size % rows:
        raise InputError(
            f"{name} has {size} rows in dim {dim} on this rank, expected a multiple of {rows}: batch_dims= "
            f"promises that {rows} rows are one sample, which no two ranks can share"
        )
    return tensor.view(*tensor.shape[:dim], size // rows, rows, *tensor.shape[dim + 1 :])


def _leaf_dim(path: str, given: Any, leaf: torch.Tensor) -> int | None:
    """Return the batch dim of one tensor, counted from the front; None for a tensor without a batch dim."""
    if given is None or leaf.dim() == 0:  # a prefix over several tensors also covers scalar tensors
        return None
    if given is LEFT_OUT:
        return 0
    wanted: int | None = given if isinstance(given, int) else given.dim
    if wanted is None:
        raise InputError(
            f"batch_dims{path} is {given}, of a list with an element for each row, over which code loops in "
            "Python. Expected one tensor of all rows and dim=, the dim with these, or "
            "fxdp.compile(..., fallback='eager'), which runs it op by op"
        )
    if not -leaf.dim() <= wanted < leaf.dim():
        raise InputError(
            f"batch_dims{path} is {given}, but a tensor there has shape {tuple(leaf.shape)}: give it a dim "
            "of its own, or None if it has no batch dim"
        )
    return wanted % leaf.dim()
