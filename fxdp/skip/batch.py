"""A micro-batch between two modules; single tensors of the batch can be replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree


class Tensors(Protocol):
    """Protocol of batches for trackers: `Batch`, a list of tensors, or torchgpipe's `Batch`."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tensors."""

    def __getitem__(self, index: int, /) -> Tensor:
        """Return one tensor."""

    def __setitem__(self, index: int, tensor: Tensor, /) -> None:
        """Replace a tensor by an equal tensor."""


class Batch:
    """A tensor, or any structure of tensors, as a list of tensors.

    A tracker replaces one tensor by an equal tensor to tie a skip to the main path.
    """

    def __init__(self, value: Any) -> None:
        self._given = value
        self._exchanged = False
        self.atomic = isinstance(value, Tensor)
        self._leaves: list[Any] = [value]
        self._spec: pytree.TreeSpec | None = None
        if not self.atomic:
            self._leaves, self._spec = pytree.tree_flatten(value)
        self._at = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]

    @property
    def value(self) -> Any:
        """The structure with the current tensors; the original object if no tensor was replaced."""
        if not self._exchanged:
            return self._given
        return self._leaves[0] if self._spec is None else pytree.tree_unflatten(self._leaves, self._spec)

    tensor_or_tensors = value

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._leaves[i] for i in self._at)

    def __getitem__(self, index: int) -> Tensor:
        tensor: Tensor = self._leaves[self._at[index]]
        return tensor

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._leaves[self._at[index]] = tensor
        self._exchanged = True

    def __repr__(self) -> str:
        return f"Batch({self.value!r})"


def lane_of(batch: Tensors) -> int | None:
    """Return the index of the first tensor that can carry a gradient; None if no tensor can."""
    if isinstance(batch, Tensor):
        return None  # a bare tensor has no element to replace
    return next((i for i, x in enumerate(batch) if x.is_floating_point() or x.is_complex()), None)
