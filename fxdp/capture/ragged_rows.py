"""`fxdp.Rows`: what one tensor of a ragged batch holds, in the place of an int in `batch_dims=`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch.utils import _pytree as pytree

from fxdp.errors import InputError

_POINTERS = ("into", "starts", "bounds", "lengths", "within")


@dataclass(frozen=True, slots=True)
class Rows:
    """A leaf of `batch_dims` for a ragged batch: the axis of a tensor's rows, and what its values mean.

        x: Rows("nodes")      edge_index: Rows("edges", dim=1, into="nodes")      y: Rows("graphs")

    An axis has a size of its own on each rank; the global batch is the concatenation of the ranks' rows
    along each axis, in rank order. Values that point into an axis count from 0 on each rank, and become
    those of the global batch.

    Parameters
    ----------
    axis : the name of the axis; equal names in one batch mean one axis. A leaf of `batch_dims` that is an
        int, or omitted, has rows of the axis `"samples"`.
    dim : the dim with the rows. None: of a list or tuple, which has one element per row; each rank gets all
        elements of all ranks.
    into : the values are row numbers of this axis, as `edge_index` into nodes. A tuple: one axis for each
        index of dim 0, as of `edge_index` between users and items.
    starts : the values are where each row begins in this axis, as the `offsets` of `nn.EmbeddingBag`.
    bounds : where each row begins, and the last one ends: one value more than rows, as in `cu_seqlens`.
    lengths : how many rows of this axis belong to each row, as in the `target_lengths` of CTC; of two dims
        the products of the second, as in `image_grid_thw` of patches.
    within : the values count the rows of each sample of this axis from 0, as the `position_ids` of packed
        documents: the rows of each rank begin with a sample.

    An integer, no tensor, with `Rows("nodes")` is the number of rows of the axis, and becomes the global one.

    Raises
    ------
    InputError : more than one meaning of the values, or names and dims that are none.
    """

    axis: str
    dim: int | None = 0
    into: str | tuple[str, ...] | None = None
    starts: str | None = None
    bounds: str | None = None
    lengths: str | None = None
    within: str | None = None

    def __post_init__(self) -> None:
        """Raise if the description contradicts itself."""
        given = [name for name in _POINTERS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"Rows({self.axis!r}): {' and '.join(given)} are given; expected one of them")
        if self.dim is not None and (not isinstance(self.dim, int) or isinstance(self.dim, bool)):
            raise InputError(f"Rows({self.axis!r}): dim is {self.dim!r}; expected an int, or None for a list")
        of_any_dim = given in (["into"], ["within"])
        if given and (self.dim is None or (not of_any_dim and self.dim != 0)):
            raise InputError(
                f"Rows({self.axis!r}): {given[0]} with dim={self.dim}; expected "
                + ("dim of a tensor" if of_any_dim else "dim=0: a tensor with one dim")
            )
        for name in (self.axis, *(one for field in given for one in self._names(field))):
            if not isinstance(name, str) or not name:
                raise InputError(f"Rows: {name!r} is no name of an axis; expected text, as 'nodes'")

    def __repr__(self) -> str:
        """Return the description as it was written, without what it leaves out."""
        told = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)[1:]
            if getattr(self, f.name) != f.default
        )
        return f"Rows({', '.join([repr(self.axis), *told])})"

    @property
    def meaning(self) -> str | None:
        """The name of the field that says what the values are; None: values that point nowhere."""
        return next((name for name in _POINTERS if getattr(self, name) is not None), None)

    @property
    def targets(self) -> tuple[str, ...]:
        """The axes of which the values speak; of samples within an axis no input need have rows."""
        return () if self.meaning in (None, "within") else self._names(self.meaning)

    def _names(self, field: str) -> tuple[str, ...]:
        found = getattr(self, field)
        return found if isinstance(found, tuple) else (found,)


def has_rows(batch_dims: Any) -> bool:
    """Return whether a pytree prefix describes a ragged batch."""
    return batch_dims is not None and any(isinstance(leaf, Rows) for leaf in pytree.tree_leaves(batch_dims))
