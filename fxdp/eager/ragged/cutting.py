"""Cut one device's ragged batch, which every rank has, into the ranks' parts: where samples end.

    ptr           0 3 5 9               three graphs, nine nodes; of one graph alone the nodes are cut evenly
    x             a b c d e | f g h i   two even parts would end at node 4 or 5: graph 1 ends at 5
    edge_index    0>1 1>2 4>3 | 6>7     an edge goes with the node from which it points
    y             p q | r

Any cut is exact, since every rank has the batch and values that point are one device's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.input_axes import SAMPLES
from fxdp.capture.ragged_rows import Rows
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.local_parts import entered
from fxdp.eager.ragged.structure import Entry, Opened
from fxdp.errors import InputError, a_kind
from fxdp.ir.types.even_weights import nearest


def cut(opened: Opened, axis_of: Callable[[int], BatchAxis], samples: BatchAxis | None = None) -> Any:
    """Return a batch, opened in place, with this rank's parts as global tensors.

    Lists, integers and bounds stay as they are, and so does a tensor whose rows are not those of its axis.

    Parameters
    ----------
    axis_of : returns the axis of so many rows if nothing says where samples end.
    samples : the ranks' samples, if they are known; else the cuts are those nearest to even rows.
    """
    ends = _Ends(opened, axis_of, samples)
    values: dict[str, Any] = {}
    for path, entry in ends.entries.items():
        rows = _rows(entry)
        axis = ends.axis(rows.axis)
        if rows.bounds is None and entry.value.shape[rows.dim] == axis.total:
            dim = _dim(entry)
            local = entry.value.detach().narrow(dim, axis.offset, axis.local).clone()
            values[path] = entered(local, axis, dim, keeps_graph=False)
    return opened.make(values)


def cut_to_plain(
    opened: Opened, axis_of: Callable[[int], BatchAxis], samples: BatchAxis | None = None
) -> Any:
    """Return this rank's part of a batch, opened in place, as plain tensors that count from its rows.

    The parameters are those of `cut`.

    Raises
    ------
    InputError : a value without rows to cut, as a list of images.
    """
    ends = _Ends(opened, axis_of, samples)
    values: dict[str, Any] = {}
    for path, entry in opened.entries.items():
        if path in ends.entries:
            values[path] = _own_part(entry, ends)
        elif isinstance(entry.rows, Rows):
            raise InputError(
                f"{path} is {a_kind(entry.value)} as {entry.rows}, of which a rank has no part as plain "
                "tensors; expected a tensor with a dim of rows, or local=False"
            )
    return opened.make(values)


def _own_part(entry: Entry, ends: _Ends) -> Tensor:
    rows, axis, dim = _rows(entry), ends.axis(_rows(entry).axis), _dim(entry)
    part: Tensor = entry.value.detach().narrow(dim, axis.offset, axis.local + (rows.bounds is not None))
    if rows.meaning in (None, "lengths"):
        return part
    offsets = part.new_tensor([ends.axis(name).offset for name in rows.targets])
    return part - offsets.reshape(-1, *[1] * (part.dim() - 1))


class _Ends:
    """Where the ranks' parts end along each axis."""

    def __init__(
        self, opened: Opened, axis_of: Callable[[int], BatchAxis], samples: BatchAxis | None
    ) -> None:
        self.entries: Mapping[str, Entry] = {
            path: entry for path, entry in opened.entries.items() if _can_be_cut(entry)
        }
        self._axis_of, self._ranks, self._samples = axis_of, axis_of(0).ranks, samples
        self._known: dict[str, list[int]] = {}
        self._waiting: set[str] = set()  # those on which the ends of another axis wait

    def axis(self, name: str) -> BatchAxis:
        """Return the axis of this name, with the sizes of the ranks' parts."""
        return self._ranks.axis([end - start for start, end in pairwise([0, *self.of(name)])])

    def of(self, axis: str) -> list[int]:
        """Return the end of each rank's part along an axis."""
        if axis not in self._known:
            self._waiting.add(axis)
            self._known[axis] = (
                self._as_given(axis) or self._by_holder(axis) or self._by_pointers(axis)
                or self._as_samples(axis) or self._by_rows_within(axis)
            )  # fmt: skip
            self._waiting.discard(axis)
        return self._known[axis]

    def _as_given(self, axis: str) -> list[int] | None:
        """Return the ends of the ranks' samples, if these are the rows of an axis."""
        if self._samples is None or self._size(axis) != self._samples.total:
            return None
        holds_others = any(
            _rows(entry).axis == axis and _rows(entry).meaning in ("bounds", "starts", "lengths")
            for entry in self.entries.values()
        )
        return list(accumulate(self._samples.sizes)) if holds_others or axis == SAMPLES else None

    def _by_holder(self, axis: str) -> list[int] | None:
        """Return the ends by the axis each of whose rows has several of this one, as a graph has nodes."""
        for entry in self.entries.values():
            rows = _rows(entry)
            if axis not in rows.targets or rows.meaning == "into" or rows.axis in self._waiting:
                continue
            if self._size(rows.axis) > 1:
                begins = _begins(entry, self._size(axis))
                return [begins[end] for end in self.of(rows.axis)]
        return None

    def _by_pointers(self, axis: str) -> list[int] | None:
        """Return the ends by the rows into which this axis points, if these are in the ranks' order."""
        for entry in self.entries.values():
            rows = _rows(entry)
            if rows.axis != axis or rows.meaning != "into" or entry.value.dim() > 2:
                continue
            target, value = rows.targets[0], entry.value
            if target in self._waiting or self._size(target) <= 1:
                continue
            if value.dim() == 2:  # of an edge, the node from which it points
                value = value.select(1 - _dim(entry), 0)
            ends = torch.tensor(self.of(target), device=value.device)
            owners = torch.bucketize(value.contiguous(), ends, right=True)
            if not bool((owners[1:] < owners[:-1]).any()):
                return torch.searchsorted(
                    owners, torch.arange(1, len(ends) + 1, device=value.device)
                ).tolist()
        return None

    def _as_samples(self, axis: str) -> list[int] | None:
        """Return the ends along an axis with as many rows that hold others: of labels, those of graphs."""
        for entry in self.entries.values():
            rows = _rows(entry)
            if rows.meaning in (None, "into", "within") or rows.axis == axis or rows.axis in self._waiting:
                continue
            if self._size(rows.axis) == self._size(axis) > 1:
                return self.of(rows.axis)
        return None

    def _by_rows_within(self, axis: str) -> list[int]:
        """Return the ends by which the rows inside of samples are even, or the samples if none are known."""
        for entry in self.entries.values():
            rows = _rows(entry)
            is_held = rows.axis == axis and rows.meaning not in (None, "into", "within")
            held = rows.targets[0] if is_held else axis
            samples = self._size(axis)
            if held == axis or samples <= 1 or not self._size(held):
                continue
            begins = _begins(entry, self._size(held))
            return [nearest(begins, end) for end in accumulate(self._axis_of(begins[-1]).sizes)]
        return list(accumulate(self._axis_of(self._size(axis)).sizes))

    def _size(self, axis: str) -> int:
        """Return the rows of an axis, by the first tensor that has it."""
        of_axis = (entry for entry in self.entries.values() if _rows(entry).axis == axis)
        first = next(of_axis, None)
        return 0 if first is None else first.value.shape[_dim(first)] - (_rows(first).bounds is not None)


def _begins(entry: Entry, total: int) -> list[int]:
    """Return where each row's rows of another axis begin, and the last ones end."""
    rows, value = _rows(entry), entry.value
    if rows.bounds is not None:
        return value.tolist()  # type: ignore[no-any-return]
    if rows.starts is not None:
        return [*value.tolist(), total]
    return [0, *(value.prod(1) if value.dim() > 1 else value).cumsum(0).tolist()]


def _rows(entry: Entry) -> Rows:
    assert isinstance(entry.rows, Rows)
    return entry.rows


def _dim(entry: Entry) -> int:
    dim = _rows(entry).dim
    assert dim is not None
    return dim % int(entry.value.dim())


def _can_be_cut(entry: Entry) -> bool:
    value, rows = entry.value, entry.rows
    is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_nested
    return is_plain and isinstance(rows, Rows) and rows.dim is not None and value.dim() > 0
