"""Rules for views that rearrange dims: view, expand, permute, squeeze, repeat.

Law: views move elements and compute nothing, so partial values stay partial. A shard `S(dim, outer)` is a
batch factor between `prod(shape[:dim]) * outer` outer elements and some inner ones. It is the shard of a
different shape if that prefix, followed by the batch, occurs there.

    (T, B, H) S(1)  --view-->  (T*B, H) S(0, T)          prefix T
    (2*B, H) S(0, 2)  --view-->  (2, B, H) S(1)          prefix 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, Shard
from fxdp.ir.types.sizes import batch_factor, exact_quotient, mentions_batch, product
from fxdp.ir.types.value_types import local_shape
from fxdp.rules.dims import has_argument, moved, rearranged, wrap, wrap_all
from fxdp.rules.families.embedding import no_larger
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule


@rule("view", aten.view.default, aten._unsafe_view.default, aten.reshape.default, *existing("view_copy"))
def _regroup(op: Op) -> Iterator[Alternative]:
    """Yield shards for merged and split dims; the batch factor is found by its prefix."""
    (x,) = op.operands
    yield from linear(op, [x])
    for shard in x.shards:
        found = regrouped(x.shape, shard, op.output.shape)
        if found is not None:
            yield op.alternative({0: shard}, found)


def regrouped(shape: tuple[Dim, ...], shard: Shard, target: tuple[Dim, ...]) -> Shard | None:
    """Return the shard of this batch factor in a different shape of equal elements, or None.

    The position of the batch among the elements counts, not the dim with its size: in `[B, 4]` viewed as
    `[4, B]` a column mixes samples. The prefix shows this: 1 element before the batch there, and 4 here.
    """
    wanted = product(*shape[: shard.dim], shard.outer)
    for dim, size in enumerate(target):
        factor = batch_factor(size)
        outer = None if factor is None else exact_quotient(wanted, product(*target[:dim]))
        # the dim must be outer x batch x inner, with all of the blocks in it
        if factor is not None and outer is not None and exact_quotient(factor, outer) is not None:
            return Shard(dim, outer)
    return None


@rule("view", *existing("_reshape_copy", "_reshape_alias", "_reshape_alias_copy"))
def _reshape_copy(op: Op) -> Iterator[Alternative]:
    """Yield shards for reshapes that copy; some take strides of the full value, so `reshape` runs instead."""
    for alternative in _regroup(op):
        shape = local_shape(op.output, alternative.outputs[0])
        rewrite = Rewrite(target=aten.reshape.default, arguments=(("shape", shape),))
        yield replace(alternative, rewrite=rewrite)


@rule("view", aten.view.dtype, *existing("view_copy.dtype"))
def _bitcast(op: Op) -> Iterator[Alternative]:
    """Yield shards for reading bits as a different dtype, except of a last dim that changes its size."""
    yield from moved(op, lambda d: d if op.operands[0].shape[d] == op.output.shape[d] else None)


@rule("view", aten.expand.default, *existing("expand_copy"))
def _expand(op: Op) -> Iterator[Alternative]:
    """Yield shards for repeating dims of size 1; a dim that becomes a batch dim is local for free.

    A partial value is reduced before it grows: the gradient of a mean over the batch is one row.
    """
    (x,) = op.operands
    added = len(op.output.shape) - x.ndim
    if no_larger(op.output, x.type):
        yield from linear(op, [x])
    yield from moved(op, lambda d: d + added)
    for dim, size in enumerate(op.output.shape):
        # all rows are copies of the one that each rank has in full, so any range of rows is a local expand
        repeated = dim < added or x.shape[dim - added] == 1
        if repeated and batch_factor(size) is not None:
            yield op.alternative({}, Shard(dim))


@rule("view", aten.permute.default, *existing("permute_copy"))
def _permute(op: Op) -> Iterator[Alternative]:
    """Yield shards for permuted dims."""
    (x,) = op.operands
    order = [wrap(d, x.ndim) for d in op.arg("dims")]
    yield from rearranged(op, order.index)


@rule("view", aten.transpose.int, *existing("transpose_copy.int"))
def _transpose(op: Op) -> Iterator[Alternative]:
    """Yield shards for two swapped dims."""
    (x,) = op.operands
    first, second = wrap(op.arg("dim0"), x.ndim), wrap(op.arg("dim1"), x.ndim)
    yield from rearranged(op, lambda d: second if d == first else first if d == second else d)


@rule("view", aten.t.default, *existing("t_copy"))
def _t(op: Op) -> Iterator[Alternative]:
    """Yield shards for a transposed matrix; vectors and numbers stay."""
    (x,) = op.operands
    yield from rearranged(op, lambda d: x.ndim - 1 - d)


@rule("view", aten.unsqueeze.default, *existing("unsqueeze_copy"))
def _unsqueeze(op: Op) -> Iterator[Alternative]:
    """Yield shards for an inserted dim of size 1."""
    (x,) = op.operands
    new = wrap(op.arg("dim"), x.ndim + 1)
    yield from rearranged(op, lambda d: d + (d >= new))


@rule(
    "view",
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    *existing("squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims"),
)  # fmt: skip
def _squeeze(op: Op) -> Iterator[Alternative]:
    """Yield shards for removing dims of size 1, but never a batch dim of a rank with a single sample."""
    (x,) = op.operands
    yield from linear(op, [x])
    named = range(x.ndim) if not has_argument(op, "dim") else wrap_all(op.arg("dim"), x.ndim)
    gone = tuple(d for d in sorted(named) if x.ndim and x.shape[d] == 1)
    for shard in x.shards:
        # global sizes decide which dims are removed: by local ones, a single sample would lose the batch
        rewrite = Rewrite(target=aten.squeeze.dims, arguments=(("dim", gone),))
        yield op.alternative(
            {0: shard},
            Shard(shard.dim - sum(d < shard.dim for d in gone), shard.outer),
            rewrite if shard.dim in named else None,
        )


@rule(
    "view",
    aten.view_as_real.default, aten.view_as_complex.default,
    *existing("view_as_real_copy", "view_as_complex_copy"),
)  # fmt: skip
def _complex_view(op: Op) -> Iterator[Alternative]:
    """Yield shards for adding or removing the last dim of real and imaginary parts."""
    yield from rearranged(op, lambda d: d)


@rule("view", aten.repeat.default)
def _repeat(op: Op) -> Iterator[Alternative]:
    """Yield shards: `k` copies of a shard with `outer` blocks have `k * outer`.

    A repetition by the batch is free.
    """
    (x,) = op.operands
    repeats = op.arg("repeats")
    added = len(repeats) - x.ndim
    if no_larger(op.output, x.type):
        yield from linear(op, [x])
    for shard in x.shards:
        dim = shard.dim + added
        # [x; x] of 3 + 2 rows: a rank's rows occur once in each copy, that is, in two blocks
        if repeats[dim] != 0 and not mentions_batch(repeats[dim]):
            yield op.alternative({0: shard}, Shard(dim, product(repeats[dim], shard.outer)))
    counting = [d for d, k in enumerate(repeats) if mentions_batch(k)]
    if len(counting) == 1 and batch_factor(repeats[counting[0]]) is not None:
        (dim,) = counting
        if batch_factor(op.output.shape[dim]) is not None:
            yield op.alternative({}, Shard(dim), Rewrite(local=("repeats",)))


@rule(
    "view",
    aten.as_strided.default, aten.as_strided_scatter.default, *existing("as_strided_copy"),
    kind="gathered",
)  # fmt: skip
def _as_strided(op: Op) -> Iterator[Alternative]:
    """Yield partial values only: strides refer to the full value's shape."""
    yield from linear(op, op.operands)
