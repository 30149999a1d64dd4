"""How a ragged batch enters: the ranks compare it, exchange the sizes of all axes, and make it global."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.local_parts import entered
from fxdp.eager.message_report import COUNTS
from fxdp.eager.ragged.faults import sizes_and_faults
from fxdp.eager.ragged.kinds.object_fields import Largest
from fxdp.eager.ragged.lists import gathered_list, joined_lists
from fxdp.eager.ragged.structure import Entry, Opened
from fxdp.eager.tensor import wrapped
from fxdp.errors import InputError
from fxdp.ir.network.raw_bytes import number_of
from fxdp.ranks.liveness.failure import everywhere


def enter(opened: Opened, ranks: DataRanks, *, lists_differ: bool, keeps_graph: bool = False) -> Any:
    """Return a ragged batch with global tensors; a collective call.

    `lists_differ`: ranks have lists of text or numbers that differ.

    Raises
    ------
    InputError : on all ranks alike, all that does not fit, by path and rank.
    """
    rows = _compared(opened, ranks)
    axes, largest = _axes(opened, ranks, rows)
    values = {
        entry.path: _made_global(entry, ranks, axes, largest, keeps_graph)
        for entry in sorted(opened.entries.values(), key=lambda entry: entry.path)
        if entry.rows is not None
    }
    if lists_differ:
        values |= joined_lists(ranks.gather(opened.lists), (axis.sizes for axis in axes.values()))
    return opened.make(values)


def emptied(opened: Opened) -> Opened:
    """Return the batch of a rank that has none, as those of its last one, without any rows."""
    for entry in opened.entries.values():
        if entry.rows is not None:
            entry.value = _without_rows(entry.value, entry.rows)
    opened.lists = {path: type(value)() for path, value in opened.lists.items()}
    return opened


def _compared(opened: Opened, ranks: DataRanks) -> list[tuple[int, ...]]:
    """Return all ranks' sizes, after each rank has the entries that any rank has."""
    sizes, faults = _numbers(opened)
    told = _descriptions(opened)
    doubts = int(bool(faults or opened.unknown))
    rows = ranks.exchange((number_of(repr(sorted(told)).encode()), doubts, *sizes))
    differ = any(row[0] != rows[0][0] for row in rows)
    everyones: list[str] = []
    if differ:
        everyones = _fill(opened, ranks.gather(told))
        sizes, faults = _numbers(opened)
    if differ or any(row[1] for row in rows):
        absent = [path for path in opened.unknown if path not in opened.entries]
        faults += [f"batch_dims{path} names what no rank has" for path in absent]
        by_rank = ranks.gather(faults)
        everyones += [f"rank {rank}, {fault}" for rank, found in enumerate(by_rank) for fault in found]
        if everyones:
            raise everywhere(InputError(
                "a ragged batch does not fit together, so nothing of it was computed:\n  "
                + "\n  ".join(everyones)
            ))  # fmt: skip
        rows = ranks.exchange((0, 0, *sizes))
    return [row[2:] for row in rows]


def _numbers(opened: Opened) -> tuple[list[int], list[str]]:
    """Return this rank's sizes of all axes and its integers that enter by the largest, in one order."""
    sizes, faults = sizes_and_faults(opened.entries.values())
    largest = [opened.entries[path].value or 0 for path in _largest(opened)]
    return [*(sizes.get(name, 0) for name in _names(opened)), *largest], faults


def _names(opened: Opened) -> list[str]:
    rows = (entry.rows for entry in opened.entries.values())
    return sorted({one.axis for one in rows if isinstance(one, Rows)})


def _largest(opened: Opened) -> list[str]:
    return sorted(path for path, entry in opened.entries.items() if isinstance(entry.rows, Largest))


def _axes(
    opened: Opened, ranks: DataRanks, rows: Sequence[Sequence[int]]
) -> tuple[dict[str, BatchAxis], dict[str, int]]:
    columns = list(zip(*rows, strict=True))
    names = _names(opened)
    axes = {name: ranks.axis(column) for name, column in zip(names, columns, strict=False)}
    COUNTS.add_batch({name: axis.sizes for name, axis in axes.items()})
    largest = zip(_largest(opened), columns[len(names) :], strict=True)
    return axes, {path: max(column) for path, column in largest}


def _descriptions(opened: Opened) -> list[tuple[Any, ...]]:
    """Return what the ranks compare: path, parent, key, class and fields of `rows`, kind of value."""
    found: list[tuple[Any, ...]] = []
    for entry in opened.entries.values():
        if entry.rows is None:
            continue
        kind: tuple[Any, ...] = ("list",) if isinstance(entry.value, (list, tuple)) else ("int",)
        if isinstance(entry.value, Tensor):
            shape = [] if entry.value.is_nested else list(entry.value.shape)
            dim = entry.rows.dim if isinstance(entry.rows, Rows) else None
            if dim is not None and -len(shape) <= dim < len(shape):
                shape[dim] = -1
            kind = ("tensor", str(entry.value.dtype), *shape)
        what = tuple(getattr(entry.rows, f.name) for f in fields(entry.rows))
        found.append((entry.path, entry.parent, entry.key, type(entry.rows).__name__, what, kind))
    return found


def _fill(opened: Opened, told: Sequence[Any]) -> list[str]:
    """Add what only other ranks have, without rows; return what differs."""
    first: dict[str, tuple[int, Any]] = {}
    faults = []
    for rank, described in enumerate(told):
        for one in described:
            known = first.setdefault(one[0], (rank, one))
            if known[1] != one:
                faults.append(
                    f"{one[0] or 'the batch'}: rank {rank} passes {_text(one)}, rank {known[0]} "
                    f"{_text(known[1])}; expected the same on all ranks, the number of rows aside"
                )
    device = next((e.value.device for e in opened.entries.values() if isinstance(e.value, Tensor)), None)
    for path, (rank, one) in first.items():
        own = opened.entries.get(path)
        if own is not None and (own.rows is not None or not own.is_vacant):
            continue
        parents = {"", *(entry.parent for entry in opened.entries.values())}
        if own is None and (not one[2] or one[1] not in parents):
            faults.append(f"{path}: only rank {rank} and others have it; expected it, or None, on all ranks")
            continue
        opened.add(_empty(one, own, device))
    return faults


def _text(one: tuple[Any, ...]) -> str:
    kind = one[5]
    if kind[0] != "tensor":
        return f"a {kind[0]}"
    shape = ["rows" if n == -1 else n for n in kind[2:]]
    rows = Rows(*one[4]) if one[3] == "Rows" else one[3]
    return f"{kind[1]} of {shape} as {rows}"


def _empty(one: tuple[Any, ...], own: Entry | None, device: torch.device | None) -> Entry:
    path, parent, key, name, what, kind = one
    rows: Any = Rows(*what) if name == "Rows" else Largest()
    if own is not None:
        parent, key = own.parent, own.key
    value: Any = 0
    if kind[0] == "list":
        value = [] if own is None or own.value is None else own.value
    if kind[0] == "tensor":
        dtype = getattr(torch, kind[1].partition(".")[2])
        shape = [0 if n == -1 else n for n in kind[2:]]
        value = _without_rows(torch.empty(shape, dtype=dtype, device=device), rows)
    return Entry(path, value, rows, parent, key)


def _without_rows(value: Any, rows: Rows | Largest) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)()
    if not isinstance(value, Tensor) or not isinstance(rows, Rows):
        return 0
    if rows.bounds is not None:
        return value.new_zeros(1)
    assert rows.dim is not None
    return value.narrow(rows.dim, 0, 0)


def _made_global(
    entry: Entry,
    ranks: DataRanks,
    axes: Mapping[str, BatchAxis],
    largest: Mapping[str, int],
    keeps_graph: bool,
) -> Any:
    value, rows = entry.value, entry.rows
    if isinstance(rows, Largest):
        return largest[entry.path]
    assert isinstance(rows, Rows)
    if isinstance(value, (list, tuple)):
        return gathered_list(value, ranks, keeps_graph=keeps_graph)
    axis = axes[rows.axis]
    if not isinstance(value, Tensor):
        return axis.total
    assert rows.dim is not None
    local = _global_values(value, rows, axes)
    if rows.bounds is None:
        return entered(local, axis, rows.dim % value.dim(), keeps_graph=keeps_graph)
    bounds = entered(local[1:], axis, 0, keeps_graph=False)
    return wrapped(torch.cat([value.new_zeros(1), bounds.full()]), ranks.unit)


def _global_values(value: Tensor, rows: Rows, axes: Mapping[str, BatchAxis]) -> Tensor:
    """Return values that point into an axis as those of the global batch."""
    if rows.meaning in (None, "lengths", "within"):
        return value
    offsets = [axes[name].offset for name in rows.targets]
    if not any(offsets):
        return value
    if len(offsets) == 1:
        return value + offsets[0]
    return value + value.new_tensor(offsets).reshape(-1, *[1] * (value.dim() - 1))
