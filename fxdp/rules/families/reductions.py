"""Rules for reductions over dims.

Law: a shard of a kept dim stays. A shard of a summed dim gives each rank a term of the sum: `P`. Extrema,
norms and logsumexp over a sharded dim exchange one number per slice (`families/extrema.py`,
`families/softmax.py`). All remaining reductions (product, median, mode, ...) need the reduced dims full. Sums
and means are linear. Statistics over the batch become sums before placement (`capture/cross_sample/`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import P, S, Shard
from fxdp.ir.types.sizes import axis
from fxdp.rules.builder import in_parts
from fxdp.rules.dims import argument_or_none, keeps_dims, moved, widens, wrap, wrap_all
from fxdp.rules.families.extrema import (
    extremum_in_parts,
    norm_in_parts,
    place_of_extremum,
    selected_gradient_in_parts,
)
from fxdp.rules.families.softmax import logsumexp_in_parts
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule, runs_replicated


@rule("reduction", aten.sum.default, aten.sum.dim_IntList, kind="contracted")
@rule("reduction", aten.mean.dim)
@rule("reduction", aten.mean.default, kind="gathered")
def _linear_reduction(op: Op) -> Iterator[Alternative]:
    """Yield shards and partial values for sum and mean; a mean over the batch is no sum of local means."""
    x = op.operands[0]
    if widens(x.type.dtype, op.output.dtype):
        yield from linear(op, [x])
    yield from _over_full_dims(op)
    if op.target not in (aten.mean.default, aten.mean.dim):
        yield from _terms(op)


@rule(
    "reduction",
    aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList,
    aten.linalg__powsum.default,
    kind="contracted",
)  # fmt: skip
def _sum_of_parts(op: Op) -> Iterator[Alternative]:
    """Yield shards of kept dims, and partial results over reduced ones, for sums of elementwise functions."""
    yield from _over_full_dims(op)
    yield from _terms(op)


@rule(
    "reduction",
    aten.aminmax.default, aten.prod.dim_int, aten.median.dim, aten.nanmedian.dim, aten.mode.default,
    aten.kthvalue.default, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype,
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
    *existing("var.dim", "_aminmax.dim"),
)  # fmt: skip
@rule(
    "reduction",
    aten.prod.default, aten.median.default, aten.nanmedian.default, aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype, *existing("_aminmax"),
    kind="gathered",
)  # fmt: skip
def _full_reduction(op: Op) -> Iterator[Alternative]:
    """Yield shards of kept dims, for reductions that need all elements of the reduced dims at once."""
    yield from _over_full_dims(op)


@rule(
    "reduction",
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
    kind="contracted",
)  # fmt: skip
def _extremum(op: Op) -> Iterator[Alternative]:
    """Yield shards for the largest or smallest element."""
    yield from _over_full_dims(op)
    yield from extremum_in_parts(op, _reduced(op))


@rule("reduction", aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
def _extremum_with_position(op: Op) -> Iterator[Alternative]:
    """Yield shards for the largest or smallest element, and the position of its first occurrence."""
    yield from _over_full_dims(op)
    yield from place_of_extremum(op)


@rule("reduction", aten.linalg_vector_norm.default)
def _vector_norm(op: Op) -> Iterator[Alternative]:
    """Yield shards for a norm of order `ord`."""
    yield from _over_full_dims(op)
    yield from in_parts(op, _reduced(op), norm_in_parts)


@rule("reduction", aten.logsumexp.default)
def _logsumexp(op: Op) -> Iterator[Alternative]:
    """Yield shards for the logarithm of a sum of exponentials."""
    yield from _over_full_dims(op)
    yield from in_parts(op, wrap_all(op.arg("dim"), op.operands[0].ndim), logsumexp_in_parts)


def _reduced(op: Op) -> frozenset[int]:
    """Return the reduced dims of the first operand."""
    x = op.operands[0]
    dims: Any = argument_or_none(op, "dim")
    if isinstance(dims, int) or dims:
        return wrap_all(dims, x.ndim)
    # no dims are all dims; the few overloads for which an empty list reduces nothing keep the shape
    return frozenset() if dims is not None and op.output.shape == x.shape else frozenset(range(x.ndim))


def _over_full_dims(op: Op) -> Iterator[Alternative]:
    reduced, keeps = _reduced(op), keeps_dims(op)

    def stays(dim: int) -> int | None:
        if dim in reduced:
            return None
        return dim if keeps else dim - sum(d < dim for d in reduced)

    return moved(op, stays)


def _terms(op: Op) -> Iterator[Alternative]:
    reduced = _reduced(op)
    for shard in op.operands[0].shards:
        if shard.dim in reduced:
            yield op.alternative({0: shard}, P)


@rule("reduction", aten.value_selecting_reduction_backward.default)
def _selecting_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for the gradient of max, median, ... along a dim: the gradient at indices, else 0."""
    grad, indices = op.operands
    keeps = bool(op.arg("keepdim"))
    dim = wrap(op.arg("dim"), len(op.output.shape))
    yield from linear(op, [grad])
    for shard in dict.fromkeys((*grad.shards, *indices.shards)):
        target = shard.dim if keeps else shard.dim + (shard.dim >= dim)
        if target != dim:
            yield op.alternative({0: shard, 1: shard}, Shard(target, shard.outer))
    yield from selected_gradient_in_parts(op)


@rule("reduction", aten.trace.default, kind="gathered")
def _trace(op: Op) -> Iterator[Alternative]:
    """Yield partial values only: the sum of a diagonal needs global row numbers."""
    yield from linear(op, op.operands)


# one result for full values
runs_replicated(
    "of_everything", "reduction",
    aten.equal.default, aten._is_any_true.default, aten._is_all_true.default, aten.dist.default,
    *existing("allclose", "hash_tensor"),
)  # fmt: skip


@rule("reductions", *existing("segment_reduce", "_segment_reduce_backward"))
def _by_lengths(op: Op) -> Iterator[Alternative]:
    """Yield the shard of rows and results, if the lengths count the rows of an axis (`Operand.counts`)."""
    lengths, data = op.arg("lengths"), op.arg("data")
    if lengths is None or lengths.counts is None or op.arg("axis") != 0 or lengths.ndim != 1:
        return
    if data.shape[0] == axis(lengths.counts).total and op.arg("offsets") is None:
        # torch cannot check the lengths of no results; those of all were checked when they entered
        is_forward = op.target in existing("segment_reduce")
        rewrite = Rewrite(arguments=(("unsafe", True),)) if is_forward else None
        yield op.alternative({operand.index: S(0) for operand in op.operands}, S(0), rewrite)
