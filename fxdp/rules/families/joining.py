"""Rules for joining tensors along a dim, and splitting: cat, stack, split, unbind.

Law: a shard of a different dim stays. Along the sharded dim, numbers of blocks of equal size add up: `cat` of
`S(d, o1)` and `S(d, o2)` is `S(d, o1 + o2)`, and `split` is the inverse. Rows of different axes, each
sharded, are those of an axis that is their concatenation (`fxdp/ir/types/born_axes.py`). All ops are linear.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.born_axes import concatenation, in_parts
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, Shard
from fxdp.ir.types.sizes import batch_factor, exact_quotient, local_size
from fxdp.rules.dims import offered, rearranged, without, wrap
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule


@rule("join", aten.cat.default)
def _cat(op: Op) -> Iterator[Alternative]:
    """Yield shards for operands concatenated along a dim."""
    ndim = len(op.output.shape)
    dim = wrap(op.arg("dim"), ndim)
    yield from linear(op, op.operands)
    if any(o.ndim != ndim for o in op.operands):  # torch still accepts empty vectors beside any operand
        return
    for shard in offered(op.operands):
        if shard.dim != dim:
            yield op.alternative({o.index: shard for o in op.operands}, shard)
    along = [(o.shape[dim], s.outer) for o in op.operands for s in o.shards if s.dim == dim]
    for block in dict.fromkeys(exact_quotient(size, outer) for size, outer in along):
        yield from _blocks_merged(op, dim, block)
    yield from _axes_joined(op, dim)


def _axes_joined(op: Op, dim: int) -> Iterator[Alternative]:
    joined = concatenation([o.shape[dim] for o in op.operands])
    size = op.output.shape[dim]
    if joined is not None and size in (joined.total, in_parts(joined.total)):
        yield op.alternative({o.index: Shard(dim) for o in op.operands}, Shard(dim))


def _blocks_merged(op: Op, dim: int, block: Dim | None) -> Iterator[Alternative]:
    if block is None:
        return
    counts = [exact_quotient(o.shape[dim], block) for o in op.operands]
    full = [n for n in counts if n is not None]
    if len(full) == len(counts):
        total = sum(full[1:], full[0])
        inputs = {o.index: Shard(dim, n) for o, n in zip(op.operands, full, strict=True) if n != 0}
        yield op.alternative(inputs, Shard(dim, total))


@rule("join", *existing("block_diag", "_chunk_cat"), kind="gathered")
def _interleaved(op: Op) -> Iterator[Alternative]:
    """Yield partial values only: the places of blocks depend on the sizes of all previous blocks."""
    yield from linear(op, op.operands)


@rule("join", aten.stack.default, aten._stack.default)
def _stack(op: Op) -> Iterator[Alternative]:
    """Yield shards for operands of equal shape, stacked along a new dim."""
    dim = wrap(op.arg("dim"), len(op.output.shape))
    yield from linear(op, op.operands)
    for shard in offered(op.operands):
        moved = Shard(shard.dim + (shard.dim >= dim), shard.outer)
        yield op.alternative({o.index: shard for o in op.operands}, moved)


@rule("join", aten.unbind.int, *existing("unbind_copy.int"))
def _unbind(op: Op) -> Iterator[Alternative]:
    """Yield shards for all selections along a dim."""
    (x,) = op.operands
    dim = wrap(op.arg("dim"), x.ndim)
    yield from rearranged(op, without(dim))


@rule(
    "join",
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default, *existing("split_copy.Tensor", "split_with_sizes_copy"),
)  # fmt: skip
def _split(op: Op) -> Iterator[Alternative]:
    """Yield shards for pieces of given sizes along a dim.

    Along the sharded dim, the target is `split_with_sizes`, because `split` of an empty part returns one
    piece only.
    """
    (x,) = op.operands
    dim = wrap(op.arg("dim"), x.ndim)
    yield from linear(op, [x])
    for shard in x.shards:
        if shard.dim != dim:
            yield op.alternative({0: shard}, shard)
        else:
            yield from _full_blocks(op, shard)


def _full_blocks(op: Op, shard: Shard) -> Iterator[Alternative]:
    (x,) = op.operands
    block = exact_quotient(x.shape[shard.dim], shard.outer)
    sizes = [t.shape[shard.dim] for t in op.outputs if t is not None]
    if block is None or any(batch_factor(n) is None for n in sizes):
        return
    counts = [exact_quotient(n, block) for n in sizes]
    pieces = tuple(Shard(shard.dim, n) for n in counts if n is not None)
    if len(pieces) == len(op.outputs):
        local = tuple(local_size(n) for n in sizes)
        rewrite = Rewrite(target=aten.split_with_sizes.default, arguments=(("split_sizes", local),))
        yield op.alternative({0: shard}, pieces, rewrite)
