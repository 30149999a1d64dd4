"""The axis of tensors of a compiled call beside graphs, where no key tells: by their sizes on all ranks.

                 rank 0    rank 1
    nodes        7         2             of `x`, `batch`
    graphs       3         1             of `ptr`
    rows of y    3         1             graphs, as on each rank there are as many

Any choice is exact, since each tensor is the concatenation of all ranks' rows along its dim; the right one is
that by which the model's sizes meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import LEFT_OUT, spread_dims
from fxdp.capture.ragged_rows import Rows
from fxdp.errors import InputError
from fxdp.ranks.liveness.failure import everywhere

_OPEN = "rows of "
Gather = Callable[[Any], Sequence[Any]]
"""Returns all ranks' values; a collective call."""


def open_axis(path: str) -> str:
    """Return the axis of a tensor as long as nothing else is known to have as many rows."""
    return _OPEN + path


def decided(batch_dims: Any, tree: Any, gather: Gather) -> Any:
    """Return `batch_dims` with another axis in the place of each open one that has as many rows on all ranks.

    Raises
    ------
    InputError : on all ranks alike, a tensor that has as many rows as several axes; or ranks whose graphs
        have other values.
    """
    args, kwargs = tree
    sizes: dict[str, int] = {}
    for _, rows, leaf in spread_dims(args, kwargs, batch_dims):
        if isinstance(rows, Rows) and rows.dim is not None:
            sizes.setdefault(rows.axis, int(leaf.shape[rows.dim]) - (rows.bounds is not None))
    every = [dict(one) for one in gather(tuple(sizes.items()))]
    if any(one.keys() != every[0].keys() for one in every):
        listed = "\n  ".join(f"rank {rank}: {', '.join(one)}" for rank, one in enumerate(every))
        raise everywhere(InputError(f"the ranks' graphs have other values, by these axes:\n  {listed}"))
    names = _names(every)

    def named(rows: Any) -> Any:
        return replace(rows, axis=names.get(rows.axis, [rows.axis])[0]) if isinstance(rows, Rows) else rows

    found = pytree.tree_map(named, batch_dims)
    if doubts := {axis: axes for axis, axes in names.items() if len(axes) > 1}:
        raise everywhere(InputError(_told(doubts, found)))
    return found


def _names(every: Sequence[Mapping[str, int]]) -> dict[str, list[str]]:
    """Return for each open axis all others that have as many rows on all ranks."""
    axes = list(every[0])
    found: dict[str, list[str]] = {}
    for axis in axes:
        if axis.startswith(_OPEN):
            alike = [other for other in axes if all(one[other] == one[axis] for one in every)]
            known = [other for other in alike if not other.startswith(_OPEN)]
            before = alike[: alike.index(axis)]
            if known or before:
                found[axis] = known or found.get(before[0], before[:1])
    return found


def _told(doubts: Mapping[str, Sequence[str]], found: Any) -> str:
    listed = "\n  ".join(
        f"{axis.removeprefix(_OPEN)}: {' or '.join(map(repr, axes))}" for axis, axes in doubts.items()
    )
    shown = pytree.tree_map(lambda rows: None if rows is LEFT_OUT else rows, found)
    return (
        f"on each rank these have as many rows as several axes of the graphs:\n  {listed}\nExpected sizes "
        "that tell them apart, or batch_dims= that names the right axis; with the first of each it is\n"
        f"batch_dims={shown!r}"
    )
