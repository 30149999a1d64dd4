"""Where samples of a ragged batch end along each axis, and by these its micro-batches.

    batch        0 0 0 1 2 2     into graphs     nodes of graph 0 end at 3, of graph 1 at 4
    edge_index   0>1 1>2 5>4     into nodes      edges of graph 0 end at 2, of graph 1 at 2, too

    graphs  1 | 2      nodes  3 | 3      edges  2 | 1      two micro-batches: the rows of all axes are even

The samples are the rows of the one axis that points into no other. If rows of others only connect these, as
edges do, each row at which all axes can be cut begins a sample: without `batch`, nodes 3 and 4. An axis that
points into two such axes, as pairs of users and items, joins these: an item is with the users of its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fxdp.capture.inputs import Inputs
from fxdp.errors import InputError
from fxdp.ir.network.raw_bytes import number_of
from fxdp.ir.types.even_weights import nearest

_NO_ROW = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class _Pointers:
    """The values of one input that name rows of an axis: the least and the largest of each row.

    `connect` says that a row names several rows, and so belongs to none of them alone.
    """

    path: str
    axis: str
    target: str
    least: Tensor
    largest: Tensor
    connect: bool

    def cuts(self, cuts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cut of the axis for each cut of the target, and whether no value points across."""
        no_row = self.least.new_tensor([_NO_ROW])
        up_to = self.largest.cummax(0).values if len(self.largest) else self.largest
        from_here = torch.cat([self.least, no_row]).flip(0).cummin(0).values.flip(0)
        found = torch.searchsorted(up_to, cuts)
        return found, from_here[found] >= cuts


class SampleCuts(NamedTuple):
    """Where a rank's part of a ragged batch is cut into micro-batches or blocks.

    Attributes
    ----------
    samples : the number of samples.
    ends : where the micro-batches but the last end along each axis, the batch's own first.
    """

    samples: int
    ends: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> tuple[int, int]:
        """The samples, and a number that tells the ends apart, as ranks exchange them."""
        return self.samples, number_of(repr(self.ends).encode())


def sample_cuts(inputs: Inputs, microbatches: int, block: int | None) -> SampleCuts:
    """Return where the micro-batches end, or blocks of this many samples.

    Raises
    ------
    InputError : see `sample_ends`.
    """
    ends = sample_ends(inputs, joins=block is None)
    samples = len(ends[""]) - 1
    cuts: Sequence[int]
    if block is not None:
        cuts = range(block, samples, block)
    else:
        heights = [sum(places) for places in zip(*ends.values(), strict=True)]
        cuts = [nearest(heights, heights[-1] * k / microbatches) for k in range(1, microbatches)]
    return SampleCuts(samples, tuple(tuple(places[cut] for cut in cuts) for places in ends.values()))


def sample_ends(inputs: Inputs, *, joins: bool = True) -> dict[str, list[int]]:
    """Return where samples end along each axis, after a 0 at which the first begins; the batch's own first.

    `joins`: axes may be joined by what points into both. A row of which nothing says where it belongs is then
    with those before it on its rank, which blocks that are alike on any number of ranks cannot have.

    Raises
    ------
    InputError : rows of a sample that do not stand together, by the path of the input; axes that are not
        connected; values whose rows cannot be cut.
    """
    names = ("", *inputs.axes.further)
    sizes = {"": inputs.batch or 0} | {name: inputs.sizes[name] for name in inputs.axes.further}
    pointers = list(_pointers(inputs))
    joined = _joined(names, pointers, sizes) if joins else []
    joining = {other.axis for one in joined for other in pointers if other.target == one.axis}
    pointers += joined
    samples = _axis_of_samples(names, pointers, inputs)
    if not sizes[samples] and any(sizes.values()):
        return {name: [0, size] for name, size in sizes.items()}
    cuts = {samples: torch.arange(sizes[samples] + 1, device="cpu")}
    can_be_cut = torch.ones(sizes[samples] + 1, dtype=torch.bool, device="cpu")
    holds_rows = any(
        one.target == samples and not one.connect and one.axis not in joining for one in pointers
    )
    waiting = pointers
    while waiting:
        one = next((one for one in waiting if one.target in cuts), waiting[0])
        if one.target not in cuts:
            raise InputError(
                f"{one.path}: {_shown(one.axis, inputs)!r} and {_shown(one.target, inputs)!r} point into "
                "each other, so neither has samples; expected one axis that points into no other"
            )
        waiting = [other for other in waiting if other is not one]
        found, fits = one.cuts(cuts[one.target])
        fits &= found == cuts.setdefault(one.axis, found)
        if holds_rows and not bool(fits.all()):
            _refuse(one, inputs, int(cuts[one.target][~fits][0]), samples)
        can_be_cut &= fits
    return {name: cuts[name][can_be_cut].tolist() for name in names}


def _pointers(inputs: Inputs) -> list[_Pointers]:
    axes, found = inputs.axes, []
    for i, (path, tensor, rows) in enumerate(zip(inputs.paths, inputs.tensors, axes.rows, strict=False)):
        meaning = axes.meanings[i]
        if rows is None or meaning is None:
            continue
        assert rows.dim is not None
        values = tensor.detach().cpu().long().movedim(rows.dim, 0)[..., None].flatten(1)
        own, target = axes.names[i], meaning.axis
        if meaning.kind == "lengths":  # so each row of the target belongs to one of these
            lengths = values.prod(1)
            values = torch.arange(len(lengths)).repeat_interleave(lengths)[:, None]
            own, target = target, own
        elif meaning.kind == "within":  # a row and the first one of its sample: no cut is between these
            numbers = torch.arange(len(values))
            values, target = torch.stack([numbers, numbers - values.amax(1)], 1), own
        if count := values.shape[1]:
            least, largest = values.amin(1), values.amax(1)
            found.append(_Pointers(path, own, target, least, largest, connect=count > 1))
    return found


def _roots(names: Sequence[str], pointers: Sequence[_Pointers]) -> list[str]:
    pointing = {one.axis for one in pointers if one.target != one.axis}
    return [name for name in names if name not in pointing]


def _joined(names: Sequence[str], pointers: Sequence[_Pointers], sizes: Mapping[str, int]) -> list[_Pointers]:
    """Return pointers of the axes but the first that point into none, by what points into these and others.

    pairs: users 0 0 1, items 2 2 0    item 0 points to user 1, item 2 to user 0
    """
    found: list[_Pointers] = []
    for root in reversed(_roots(names, pointers)[1:]):
        done = {root, *(one.axis for one in found)}
        both = (
            (one, other)
            for one, other in product(pointers, pointers)
            if one.target == root and not one.connect and other.axis == one.axis and other.target not in done
        )
        if pair := next(both, None):
            one, other = pair
            rows = one.least.new_zeros(sizes[root])
            largest = rows.scatter_reduce(0, one.least, other.largest, "amax")
            least = (rows + _NO_ROW).scatter_reduce(0, one.least, other.least, "amin")
            found.append(_Pointers(one.path, root, other.target, least, largest, connect=True))
    return found


def _axis_of_samples(names: Sequence[str], pointers: Sequence[_Pointers], inputs: Inputs) -> str:
    """Return the axis that points into no other.

    Raises
    ------
    InputError : several do, so that nothing says which of their rows belong to one sample; or none.
    """
    found = _roots(names, pointers)
    if len(found) != 1:
        shown = " and ".join(repr(_shown(name, inputs)) for name in found) or "none"
        raise InputError(
            "a ragged batch that is cut where samples end (micro-batches, blocks, fxdp.verify), but the axes "
            f"that point into no other are {shown}; expected one, the samples, to which all others point "
            "(into=)"
        )
    return found[0]


def _refuse(one: _Pointers, inputs: Inputs, row: int, samples: str) -> None:
    raise InputError(
        f"{one.path}: rows of {_shown(one.axis, inputs)!r} before and after row {row} of "
        f"{_shown(one.target, inputs)!r} do not stand apart, so {_shown(samples, inputs)!r} cannot be cut "
        "there (micro-batches, blocks, fxdp.verify); expected the rows of each sample together, in the order "
        "of the samples"
    )


def _shown(name: str, inputs: Inputs) -> str:
    """Return an axis as the user names it."""
    axes = zip(inputs.axes.names, inputs.axes.rows, strict=True)
    return next(rows.axis for of, rows in axes if of == name and rows is not None)
