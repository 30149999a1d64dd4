"""Rules for reads and writes along one dim at given positions: gather, scatter, index_select, index_add.

Laws: all dims except `dim` may be sharded if all tensors agree in size. A read may be sharded along the
positions, from a full operand. Writes that *add* may be sharded along the positions too, with a partial
result. Positions that point to rows of the rank's own (`Operand.into`), as `arange(B)` or a graph's edges,
access these alone: then `dim` itself is sharded and the positions count from the rank's first row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxdp.ir.ops.library import aten
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import P, Placement, S, Shard
from fxdp.rules.families.embedding import no_larger
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, Operand, rule


@rule("gathering", aten.gather.default)
def _gather(op: Op) -> Iterator[Alternative]:
    """Yield shards and partial values for `self[.., index, ..]` along `dim`, element by element."""
    source, index = op.operands
    if source.ndim == 0 or index.ndim == 0:
        return
    dim, kept = _kept_labels(op, source)
    yield from by_labels(op, [(source, kept), (index, _with(kept, dim))], [_with(kept, dim)])
    yield from _own_rows(op, index, dim, dim, source)
    yield from linear(op, [source])


@rule("gathering", aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
@rule("gathering", aten.scatter_reduce.two, aten.scatter_add.default, kind="contracted")
def _scatter(op: Op) -> Iterator[Alternative]:
    """Yield shards for writes at positions along `dim`; additions are partial over sharded positions."""
    target, index, *sources = op.operands
    if any(o.ndim == 0 for o in op.operands):
        return
    dim, kept = _kept_labels(op, target)
    yield from by_labels(op, [(o, kept) for o in op.operands], [kept])
    yield from _own_rows(op, index, dim, dim, target, sources)
    if _adds(op):
        along = _with("_" * target.ndim, dim)
        yield from _sums(op, [(index, along), (sources[0], along)], target, sources[0])


@rule("gathering", aten.index_select.default)
def _index_select(op: Op) -> Iterator[Alternative]:
    """Yield shards and partial values for entire slices at the positions of a 1-d index."""
    source, index = op.operands
    if source.ndim == 0 or index.ndim == 0:
        return
    dim, kept = _kept_labels(op, source)
    yield from by_labels(op, [(source, kept), (index, "Z")], [_with(kept, dim)])
    yield from _own_rows(op, index, 0, dim, source)
    yield from linear(op, [source])


@rule(
    "gathering",
    aten.index_copy.default, aten.index_reduce.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
)  # fmt: skip
@rule("gathering", aten.index_add.default, kind="contracted")
def _index_write(op: Op) -> Iterator[Alternative]:
    """Yield shards for slices written at positions of a 1-d index.

    The result of `index_add` is partial over sharded positions.
    """
    target, index, *values = op.operands
    if target.ndim == 0 or index.ndim == 0:
        return
    sources = [v for v in values if v.ndim]  # index_fill's value is a 0-d tensor
    if any(s.ndim != target.ndim for s in sources):
        return
    dim, kept = _kept_labels(op, target)
    yield from by_labels(op, [(target, kept), *((s, kept) for s in sources)], [kept])
    yield from _own_rows(op, index, 0, dim, target, sources)
    if op.target is aten.index_add.default:
        along = _with("_" * target.ndim, dim)
        yield from _sums(op, [(index, "Z"), (sources[0], along)], target, sources[0])


@rule("gathering", aten.take.default)
def _take(op: Op) -> Iterator[Alternative]:
    """Yield shards of the positions of elements in the flattened operand, which must be full (or partial)."""
    source, index = op.operands
    names = letters(index.ndim)
    yield from by_labels(op, [(index, names)], [names])
    yield from linear(op, [source])


@rule("gathering", aten.put.default, kind="contracted")
def _put(op: Op) -> Iterator[Alternative]:
    """Yield shards of positions at which `put` *adds* to the flattened operand, with partial result."""
    target, index, source = op.operands
    if op.arg("accumulate") and index.ndim == source.ndim:
        names = letters(index.ndim)
        yield from _sums(op, [(index, names), (source, names)], target, source)


def sums_of_parts(op: Op, target: Operand, source: Operand) -> Iterator[Alternative]:
    """Yield partial target and source for a write, linear in both, unless that enlarges the partial value."""
    if P in target.placements or no_larger(op.output, source.type):
        yield from linear(op, [target, source])


def _kept_labels(op: Op, operand: Operand) -> tuple[int, str]:
    """Return the op's `dim`, and labels for all remaining dims."""
    dim = int(op.arg("dim")) % operand.ndim
    return dim, letters(operand.ndim, full={dim})


def _with(labels: str, dim: int) -> str:
    return labels[:dim] + "Z" + labels[dim + 1 :]


def _own_rows(
    op: Op, index: Operand, along: int, dim: int, accessed: Operand, written: Sequence[Operand] | None = None
) -> Iterator[Alternative]:
    """Yield the shard by which each rank accesses rows of its own, if the index points to these.

    `dim` of `accessed` has the rows; `along` is the dim of the index with the positions, to which `dim` of
    the `written` values and of what is read belongs.
    """
    into = index.into
    # one block of rows: with several, a local row number is not the global one minus the offset
    if into is None or into.shard.dim != along or accessed.shape[dim] != into.size:
        return
    positions = Shard(dim, into.shard.outer)
    if any(value.shape[dim] != index.shape[along] for value in written or ()):
        return
    chosen: dict[int, Placement] = {value.index: positions for value in written or ()}
    chosen |= {accessed.index: S(dim), index.index: into.shard}
    result = positions if written is None else S(dim)
    yield op.alternative(dict(chosen), result, Rewrite(minus_offset=(index.index,), offset=into.offset))


def _adds(op: Op) -> bool:
    if op.target is aten.scatter_reduce.two:
        # without the target's values, a row written by one rank would keep them on all remaining ranks
        return op.arg("reduce") == "sum" and bool(op.arg("include_self"))
    return op.target is aten.scatter_add.default


def _sums(
    op: Op, inputs: Sequence[tuple[Operand, str]], target: Operand, source: Operand
) -> Iterator[Alternative]:
    """Yield partial results for additions at positions: each rank adds at its own positions."""
    yield from by_labels(op, inputs, ["_" * target.ndim], addends=[target])
    yield from sums_of_parts(op, target, source)
