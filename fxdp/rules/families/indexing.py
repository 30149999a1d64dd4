"""Rules for advanced indexing, `x[i, :, j]`, writes to it, and rows that values select (nonzero, a mask).

Laws, with result dims in numpy's order (index dims in place if the index tensors are adjacent, else in
front): shards of dims without an index stay; the index dims may be sharded, with each rank reading from a
full operand; a write that accumulates is partial over sharded index dims. An index that points to rows of
the rank's own (`Operand.into`), as `arange(B)` does, reads these alone: the dim with the rows is sharded by
them, and the index dim as the index is. One value written through a mask keeps the shape.

Selected rows: what ranks select from their parts, concatenated in rank order, is what one device selects, if
the parts are one range each of the first dim that has several elements. So the selected rows are a batch
axis, born here (`fxdp/ir/types/born_axes.py`): their number on a rank is known once the rank has selected.
Behind dims of known sizes, as of a mixture's `k` experts for each token, the parts are interleaved in runs.
The axis belongs to its mask: another mask may select as many rows of the global batch, but not on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch

from fxdp.ir.ops import selected_rows
from fxdp.ir.ops.library import aten
from fxdp.ir.types.born_axes import unborn
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, Placement, S, Shard
from fxdp.ir.types.sizes import axis_of, product
from fxdp.rules.families.gathering import sums_of_parts
from fxdp.rules.labels import by_labels, letters, linear, trailing
from fxdp.rules.registry import Alternative, Op, Operand, rule

MASKS = (torch.bool, torch.uint8)
SELECTIONS = frozenset({
    aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten.index.Tensor
})  # fmt: skip
"""Ops that read, with a mask or lengths as last operand, as many rows as the values of that operand say."""
_MOST_RUNS = 16
"""More are gathered: where ranks exchange the sizes of runs, each run is an op."""
_IN_BROADCAST = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Labels of an indexing op: of the operand (`_` if indexed), of the result, and the index operands."""

    source: str
    result: str
    broadcast: str
    indexed: tuple[tuple[int, Operand], ...]

    @property
    def indices(self) -> list[tuple[Operand, str]]:
        return [(o, trailing(self.broadcast, o.ndim)) for _, o in self.indexed]


def _layout(source: Operand, indices: tuple[Operand | None, ...]) -> _Layout | None:
    indexed = tuple((d, o) for d, o in enumerate(indices) if o is not None)
    # the number of rows that a mask selects depends on all of its values
    if not indexed or any(o.type.dtype in MASKS for _, o in indexed):
        return None
    dims = [d for d, _ in indexed]
    broadcast = _IN_BROADCAST[: max(o.ndim for _, o in indexed)]
    labels = letters(source.ndim, full=dims)
    kept = [name for name in labels if name != "_"]
    # x[i, j] keeps the index dims in place; x[i, :, j] has no single place for these, and puts them in front
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    at = dims[0] if adjacent else 0
    result = "".join([*kept[:at], broadcast, *kept[at:]])
    return _Layout(labels, result, broadcast, indexed)


def _own_rows(
    op: Op, layout: _Layout, source: Operand, values: tuple[Operand, str] | None = None
) -> Iterator[Alternative]:
    """Yield the shard of the rows for each index that points to rows of the rank's own; `values` are written.

        x[arange(B), last], rank 1 of (3, 2):  x rows 3 4, index 3 4, less the offset: local rows 0 1

    Without this, a rank would need all of x to read its own rows. The dim has the size of the axis, not a
    multiple: so a shard is one block, and the local number of a row is the global one minus the offset.
    """
    for dim, index in layout.indexed:
        into = index.into
        if into is None or source.shape[dim] != into.size:
            continue
        label, size = trailing(layout.broadcast, index.ndim)[into.shard.dim], index.shape[into.shard.dim]
        along = [*layout.indices, *([] if values is None else [values])]
        places = [(o, labels.index(label)) for o, labels in along if label in labels]
        if any(o.shape[d] not in (1, size) for o, d in places):
            continue
        chosen: dict[int, Placement] = {
            o.index: Shard(d, into.shard.outer) for o, d in places if o.shape[d] == size
        }
        result = Shard(layout.result.index(label), into.shard.outer) if values is None else Shard(dim)
        rewrite = Rewrite(minus_offset=(index.index,), offset=into.offset)
        yield op.alternative({**chosen, source.index: Shard(dim)}, result, rewrite)


def _keep(labels: str, kept: str) -> str:
    return "".join(c if c in kept else "_" for c in labels)


@rule("indexing", aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(op: Op) -> Iterator[Alternative]:
    """Yield shards and partial values for `self[indices]`."""
    source, indices = op.arg("self"), op.arg("indices")
    layout = _layout(source, indices)
    if layout is None:
        yield from _selected(op, source, indices)
        return
    inputs = [(source, layout.source), *layout.indices]
    yield from by_labels(op, inputs, [layout.result], broadcast=True)
    yield from _own_rows(op, layout, source)
    yield from linear(op, [source])


@rule("indexing", aten.index_put.default, aten._unsafe_index_put.default, kind="contracted")
def _index_put(op: Op) -> Iterator[Alternative]:
    """Yield shards and partial values for `self[indices] = values`, or `+=`."""
    target, indices, values = op.arg("self"), op.arg("indices"), op.arg("values")
    layout = _layout(target, indices)
    if layout is None:
        yield from _masked_write(op, target, indices, values)
        return
    written = trailing(layout.result, values.ndim)
    carried = [(target, layout.source), (values, _keep(written, layout.source))]
    yield from by_labels(op, carried, [layout.source], broadcast=True)
    if not _fits(values, written, layout):
        return
    positions = [*layout.indices, (values, _keep(written, layout.broadcast))]
    yield from _own_rows(op, layout, target, positions[-1])
    # Ranks may write to one row. Added values come together in a sum, in which the target counts once.
    # Of plain writes one must win, which no rank can know: then the positions are not sharded.
    if op.arg("accumulate"):
        yield from by_labels(op, positions, ["_" * target.ndim], broadcast=True, addends=[target])
        yield from sums_of_parts(op, target, values)


def _fits(values: Operand, written: str, layout: _Layout) -> bool:
    """Return whether the written values broadcast to the positions; the meta kernel does not ask."""
    sizes: dict[str, set[Dim]] = {}
    for operand, labels in layout.indices:
        for label, size in zip(labels, operand.shape, strict=True):
            sizes.setdefault(label, set()).add(size)
    dims = zip(written, values.shape, strict=True)
    return all(n == 1 or label not in sizes or n in sizes[label] for label, n in dims)


def _only_mask(indices: tuple[Operand | None, ...]) -> tuple[int, Operand] | None:
    """Return the only index and its first dim, if it is a mask."""
    found = [(d, o) for d, o in enumerate(indices) if o is not None]
    return found[0] if len(found) == 1 and found[0][1].type.dtype in MASKS else None


def _selected(op: Op, source: Operand, indices: tuple[Operand | None, ...]) -> Iterator[Alternative]:
    """Yield shards of the rows that one mask selects, and of all dims without a mask."""
    found = _only_mask(indices)
    if found is None:
        return
    at, mask = found
    kept = letters(source.ndim, full=range(at, at + mask.ndim))
    yield from by_labels(op, [(source, kept)], [kept[:at] + "_" + kept[at + mask.ndim :]])
    for shard in _rows_of_each_rank(mask, op.output.shape[at]):
        yield op.alternative({source.index: Shard(at + shard.dim), mask.index: shard}, Shard(at))
    yield from linear(op, [source])


def _masked_write(
    op: Op, target: Operand, indices: tuple[Operand | None, ...], values: Operand
) -> Iterator[Alternative]:
    """Yield shards for writes through one mask: of selected rows, or of one value, as `where` does."""
    found = _only_mask(indices)
    if found is None:
        return
    at, mask = found
    if any(n != 1 for n in values.shape):
        yield from _selected_write(op, target, (at, mask), values)
        return
    names = letters(target.ndim)
    yield from by_labels(op, [(target, names), (mask, names[at : at + mask.ndim])], [names])


def _selected_write(
    op: Op, target: Operand, masked: tuple[int, Operand], values: Operand
) -> Iterator[Alternative]:
    """Yield shards of all dims without the mask, and of the rows that the mask selects on each rank."""
    at, mask = masked
    names = letters(target.ndim, full=range(at, at + mask.ndim))
    written = names[:at] + "_" + names[at + mask.ndim :]
    if values.ndim == len(written):
        yield from by_labels(op, [(target, names), (values, written)], [names])
        for shard in _rows_of_each_rank(mask, values.shape[at]):
            along = Shard(at + shard.dim)
            yield op.alternative({target.index: along, mask.index: shard, values.index: Shard(at)}, along)
    if op.arg("accumulate"):
        yield from sums_of_parts(op, target, values)


def _rows_of_each_rank(selector: Operand, size: Dim) -> Iterator[Shard]:
    """Yield the shards of a selector under which a dim of this size has the rows that each rank selects."""
    of = axis_of(size)
    known = of if of is not None and size == of.total and of.name in (selector.selects or ()) else None
    if selector.selects is None or not (known or unborn(size)):
        return
    for shard in selector.shards:
        along, runs = axis_of(selector.shape[shard.dim]), runs_of(selector.shape, shard)
        is_range = runs > 0 and along is not None and along.is_contiguous
        if is_range and (known is None or len(known.parts) == runs):
            yield shard


def runs_of(shape: tuple[Dim, ...], shard: Shard) -> int:
    """Return how many ranges of the selected rows each rank selects; 0: no known number, or too many."""
    before = product(*shape[: shard.dim])
    return before if isinstance(before, int) and before <= _MOST_RUNS and shard.outer == 1 else 0


def _first_row(selector: Operand, shard: Shard) -> Dim:
    """Return the number of elements along the sharded dim on the ranks before this one."""
    size = selector.shape[shard.dim]
    along = axis_of(size)
    assert along is not None
    return sympy.sympify(size).xreplace({along.total: along.offset})


@rule("selection", aten.nonzero.default)
def _nonzero(op: Op) -> Iterator[Alternative]:
    """Yield the positions in a rank's part, counted from the first element of all ranks."""
    (mask,) = op.operands
    for shard in _rows_of_each_rank(mask, op.output.shape[0]):
        counted = ("column", shard.dim), ("offset", _first_row(mask, shard))
        yield op.alternative({0: shard}, S(0), Rewrite(target=selected_rows.nonzero, arguments=counted))


@rule("selection", aten.masked_select.default)
def _masked_select(op: Op) -> Iterator[Alternative]:
    """Yield the elements that a mask of equal shape selects from a rank's part."""
    source, mask = op.operands
    if source.shape == mask.shape:
        for shard in _rows_of_each_rank(mask, op.output.shape[0]):
            yield op.alternative({0: shard, 1: shard}, S(0))


@rule("selection", aten.repeat_interleave.Tensor)
def _repeat_interleave(op: Op) -> Iterator[Alternative]:
    """Yield the row numbers that the lengths of a rank's rows repeat."""
    (lengths,) = op.operands
    if op.arg("output_size") is None:
        for shard in _rows_of_each_rank(lengths, op.output.shape[0]):
            counted = (("offset", _first_row(lengths, shard)),)
            rewrite = Rewrite(target=selected_rows.repeat_interleave, arguments=counted)
            yield op.alternative({0: shard}, S(0), rewrite)
