"""What is wrong with one rank's part of a ragged batch: all faults at once, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.lists import untold
from fxdp.eager.ragged.structure import Entry
from fxdp.errors import InputError, a_kind


def check_together(paths: Sequence[str], tensors: Sequence[Tensor], rows: Sequence[Rows | None]) -> None:
    """Raise if this rank's part of a ragged call contradicts itself.

    Raises
    ------
    InputError : with all faults by argument path.
    """
    _, faults = sizes_and_faults(Entry(*one) for one in zip(paths, tensors, rows, strict=False))
    if faults:
        raise InputError(
            "a ragged batch does not fit together, so nothing of it was computed:\n  " + "\n  ".join(faults)
        )


def sizes_and_faults(entries: Iterable[Entry]) -> tuple[dict[str, int], list[str]]:
    """Return the rows that this rank has along each axis, and all that contradicts them."""
    entries = [entry for entry in entries if isinstance(entry.rows, Rows)]
    faults = [fault for entry in entries for fault in _faults_of_form(entry)]
    if faults:
        return {}, faults
    counted: dict[str, dict[int, str]] = {}
    for entry in entries:
        assert isinstance(entry.rows, Rows)
        counted.setdefault(entry.rows.axis, {}).setdefault(local_rows(entry), entry.path)
    for axis, found in counted.items():
        if len(found) > 1:
            listed = " and ".join(f"{size} rows in {path or 'the batch'}" for size, path in found.items())
            faults.append(f"the axis {axis!r} has {listed}; expected one number")
    sizes = {axis: next(iter(found)) for axis, found in counted.items()}
    for entry in entries:
        assert isinstance(entry.rows, Rows)
        unknown = [name for name in entry.rows.targets if name not in sizes]
        if unknown:
            faults.append(
                f"{entry.path}: {entry.rows.meaning}={unknown[0]!r} is an axis of which no input has rows; "
                f"expected one of {sorted(sizes)}"
            )
        elif isinstance(entry.value, Tensor):
            faults += (f"{entry.path}: {text}" for text in _faults_of_values(entry.value, entry.rows, sizes))
    return sizes, faults


def local_rows(entry: Entry) -> int:
    """Return the rows of an entry on this rank."""
    value, rows = entry.value, entry.rows
    assert isinstance(rows, Rows)
    if isinstance(value, Tensor):
        assert rows.dim is not None
        return int(value.shape[rows.dim]) - (rows.bounds is not None)
    return value if isinstance(value, int) else len(value)


def _faults_of_form(entry: Entry) -> Iterator[str]:
    value, rows = entry.value, entry.rows
    assert isinstance(rows, Rows)
    if not isinstance(value, Tensor):
        if isinstance(value, int) and value < 0:
            yield f"{entry.path}: {value} rows of {rows.axis!r}; expected no negative number"
        elif (found := untold(value)) is not None:
            yield f"{entry.path}: an element has {a_kind(found)}; expected tensors, numbers and text"
        return
    if value.is_nested or value.layout != torch.strided:
        yield f"{entry.path}: a tensor of layout {value.layout} in a ragged batch; expected a dense one"
    elif rows.dim is None:
        yield f"{entry.path}: a tensor where {rows} says a list; expected dim=, the dim with its rows"
    elif not -value.dim() <= rows.dim < value.dim():
        yield f"{entry.path}: {rows} of a tensor of shape {tuple(value.shape)}; expected one of its dims"
    elif rows.meaning is not None:
        yield from (f"{entry.path}: {text}" for text in _faults_of_pointers(value, rows))


def _faults_of_pointers(value: Tensor, rows: Rows) -> Iterator[str]:
    if value.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        yield f"{rows.meaning}= of a tensor of {value.dtype}; expected integers"
    elif isinstance(rows.into, tuple) and (value.dim() == 0 or value.shape[0] != len(rows.into)):
        yield f"into={rows.into} of shape {tuple(value.shape)}; expected {len(rows.into)} in dim 0"
    elif value.dim() > {"into": 64, "within": 64, "lengths": 2}.get(str(rows.meaning), 1):
        yield f"{rows.meaning}= of shape {tuple(value.shape)}; expected one dim"
    elif rows.bounds is not None and not len(value):
        yield "bounds without a value; expected [0] on a rank without rows"


def _faults_of_values(value: Tensor, rows: Rows, sizes: Mapping[str, int]) -> Iterator[str]:
    value = value.detach()
    if rows.into is not None:
        parts = [(value, rows.into)] if isinstance(rows.into, str) else zip(value, rows.into, strict=True)
        for part, axis in parts:
            yield from _outside(part, axis, sizes[axis])
        return
    if rows.within is not None:
        yield from _faults_within(value.movedim(rows.dim or 0, 0), rows.within)
    if not rows.targets:
        return
    axis = rows.targets[0]
    size = sizes[axis]
    if rows.lengths is not None:
        value = value.prod(1) if value.dim() > 1 else value
        total = int(value.sum())
        if len(value) and int(value.min()) < 0:
            yield f"lengths of {axis!r} that are negative, as {int(value.min())}"
        elif total != size:
            yield f"lengths that add up to {total}; expected {size}, the rows of {axis!r} on this rank"
        return
    first, last = (int(value[0]), int(value[-1])) if len(value) else (size and None, size)
    falls = (value[1:] < value[:-1]).nonzero()
    if first is None:
        yield f"no row begins in {axis!r}, which has {size} rows on this rank; expected a first one at 0"
    elif first != 0:
        yield f"the first value is {first}; expected 0: each rank counts its own rows of {axis!r}"
    if len(falls):
        at = int(falls[0])
        yield f"the values fall from {int(value[at])} to {int(value[at + 1])} at {at + 1}; expected no fall"
    if rows.bounds is not None and last != size:
        yield f"the last value is {last}; expected {size}, the rows of {axis!r} on this rank"
    elif last > size:
        yield f"the last value is {last}; expected at most {size}, the rows of {axis!r} on this rank"


def _faults_within(value: Tensor, axis: str) -> Iterator[str]:
    """Yield what is wrong with positions along dim 0."""
    if not value.numel():
        return
    if bool((value[0] != 0).any()):
        yield (
            f"the first row is {int(value[0].flatten()[0])} within {axis!r}; expected 0: no two ranks share "
            "a sample"
        )
    wrong = ((value[1:] != 0) & (value[1:] != value[:-1] + 1)).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        found, before = int(value[1:][tuple(at)]), int(value[tuple(at)])
        yield f"{found} after {before} at {at[0] + 1}; expected {before + 1}, or 0, where a sample begins"


def _outside(value: Tensor, axis: str, size: int) -> Iterator[str]:
    if not value.numel() or (int(value.min()) >= 0 and int(value.max()) < size):
        return
    outside = ((value < 0) | (value >= size)).nonzero()
    at, range_ = outside[0].tolist(), f"0 to {size - 1}" if size else "none"
    yield (
        f"{len(outside)} values outside of {axis!r}, as {int(value[tuple(at)])} at {at}; expected {range_}: "
        f"each rank counts its own {size} rows, and cannot point to those of another rank"
    )
