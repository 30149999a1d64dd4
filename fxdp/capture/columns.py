"""Values that point into several axes, as edges from users to items: programs get a tensor for each axis.

    edge_index [2, 9], into=("users", "items")     Columns: [9] into users, [9] into items
                                                   the model: the stack of both

So the values of each tensor point into one axis, and what reads at them stays on the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.capture.ragged_rows import Rows
from fxdp.errors import InputError


class Columns:
    """In the place of a tensor in the inputs of a call; torch's pytree makes the tensor of it again."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        _register()
        self.tensors = list(tensors)


def _flatten_with_keys(value: Columns) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    return [(pytree.SequenceKey(i), tensor) for i, tensor in enumerate(value.tensors)], None


@cache
def _register() -> None:
    """Tell torch's pytree of the class once a call needs it: what is imported changes nothing of torch."""
    pytree.register_pytree_node(
        Columns, lambda value: (value.tensors, None), lambda tensors, _: torch.stack(list(tensors)),
        flatten_with_keys_fn=_flatten_with_keys,
    )  # fmt: skip


def is_columns(value: Any) -> bool:
    """Return whether a value stands in the place of a tensor."""
    return isinstance(value, Columns)


def rows_and_tensors(rows: Any, leaf: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield each tensor of a leaf of the inputs with its part of `batch_dims`."""
    if isinstance(leaf, Columns):
        for axis, tensor in zip(rows.into, leaf.tensors, strict=True):
            yield replace(rows, dim=rows.dim % (tensor.dim() + 1) - 1, into=axis), tensor
    elif isinstance(leaf, Tensor):
        yield rows, leaf


def split(rows: Any, tensor: Tensor, path: str) -> Tensor | Columns:
    """Return a tensor as columns if its values point into several axes.

    Raises
    ------
    InputError : it has not one row for each of these axes, or the rows of the batch along dim 0.
    """
    if not isinstance(rows, Rows) or not isinstance(rows.into, tuple):
        return tensor
    if tensor.dim() < 2 or tensor.shape[0] != len(rows.into) or (rows.dim or 0) % tensor.dim() == 0:
        raise InputError(
            f"batch_dims{path} is {rows}, but the tensor there has shape {tuple(tensor.shape)}; expected "
            f"{len(rows.into)} in dim 0, one for each axis, and the batch's rows in another dim"
        )
    return Columns(tensor.unbind(0))
