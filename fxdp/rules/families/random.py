"""Rules for ops that draw random numbers.

Law, in distribution: a rank may draw the numbers of its own samples. The pass that places these ops is
responsible for numbers that must be equal on all ranks.

Law, bit for bit as on one device (`drawn_for_full_batch`): every rank draws the numbers of the global batch
and keeps its part. A generator is a sequence, so the numbers of a rank's samples are known only once all
previous ones have been drawn; drawing is local, and nothing is sent. Each op has a counterpart in the `fxdp`
library that also takes the full shape and the rank's range (`ir/ops/full_batch_draws.py`). The number of
draws must not depend on values that only remote ranks have. Bernoulli, dropout, normal and multinomial ops
make equally many draws for any values; the ops of `_BY_VALUE` are gathered and drawn in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxdp.ir.ops.full_batch_draws import FUSED_DROPOUTS, IN_PLACE, UNREAD, twin
from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.ir.types.sizes import axis_of, batch_factor, is_range
from fxdp.rules.dims import together
from fxdp.rules.families.factories import filled_like
from fxdp.rules.families.pointwise import aligned
from fxdp.rules.registry import Alternative, Op, registry, rule, runs_replicated

_BY_VALUE = frozenset(
    {"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise_functional"}
)
_IN_ORDER = frozenset({"rrelu_with_noise_functional"})
"""Ops that draw in the order of dims, for any strides of the operands.

Their noise must have this order, too.
"""


@rule(
    "random",
    aten.native_dropout.default, aten.bernoulli.default, aten.bernoulli.Tensor, aten.poisson.default,
    aten.binomial.default, aten._standard_gamma.default,
    aten.rrelu_with_noise_functional.default, aten.normal.Tensor_float, aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor, *existing("_fused_dropout"),
)  # fmt: skip
def _drawn_per_element(op: Op) -> Iterator[Alternative]:
    """Yield aligned shards: each element is drawn separately, from parameters aligned with it."""
    yield from aligned(op)


@rule(
    "random",
    aten.rand_like, aten.randn_like, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.randint_like.generator, aten.randint_like.low_generator_dtype, aten.bernoulli.p,
    aten.uniform.default, aten.normal_functional.default, aten.log_normal.default, aten.cauchy.default,
    aten.exponential.default, aten.geometric.default, aten.random.default, aten.random.to,
    getattr(aten.random, "from"), *existing("randint_like.Tensor", "randint_like.Tensor_generator"),
)  # fmt: skip
def _drawn_like(op: Op) -> Iterator[Alternative]:
    """Yield shards for random numbers of the operand's shape; its values are not read."""
    yield from filled_like(op)


@rule(
    "random",
    # without overloads for named dims, which torch 2.11 still has and refuses to trace
    aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator,
    aten.randint, aten.normal.float_float,
)  # fmt: skip
def _drawn(op: Op) -> Iterator[Alternative]:
    """Yield shards for random numbers of an explicit size; a rank draws the numbers of its samples."""
    for dim, size in enumerate(op.output.shape):
        if batch_factor(size) is not None:
            yield op.alternative({}, Shard(dim))


@rule("random", aten.multinomial.default, aten._sample_dirichlet.default)
def _drawn_per_row(op: Op) -> Iterator[Alternative]:
    """Yield shards of rows, which are drawn separately, from weights along the last dim."""
    yield from together(op, frozenset({op.operands[0].ndim - 1}))


runs_replicated("permutation", "random", aten.randperm)


def drawn_for_full_batch(
    op: Op, order: tuple[int, ...], gaps: tuple[int, ...], *, one_rank: bool
) -> Iterator[Alternative]:
    """Yield the ways to draw `op` as one device would: sharded, without traffic, or full."""
    target = op.target
    found, name = registry.get(target), target._schema.name.removeprefix("aten::")
    if found is None or found.family != "random":
        yield op.alternative()
        return
    if name in _IN_ORDER:
        order, gaps = tuple(range(len(op.output.shape))), ()
    if not one_rank and name not in _BY_VALUE:
        for alternative in found.rule(op):
            shard = alternative.outputs[0]
            if not isinstance(shard, Shard) or not is_range(op.output.shape[shard.dim]):
                continue
            if all(p == shard or p is None for p in alternative.outputs):
                yield _kept(op, alternative, shard, order, gaps)
    if found.name == "_drawn_like":
        yield _kept(op, op.alternative({0: None}), None, order, gaps)
    else:
        yield _kept(op, op.alternative(), None, order, gaps)


def _kept(
    op: Op, alternative: Alternative, shard: Shard | None, order: tuple[int, ...], gaps: tuple[int, ...]
) -> Alternative:
    # of the first operand the shape is read, of others (`high`) the value
    unread = registry[op.target].name == "_drawn_like"
    dims = tuple(
        UNREAD if unread and i == 0 else p.dim if isinstance(p, Shard) else -1
        for i, p in enumerate(alternative.inputs)
    )
    axis = None if shard is None else axis_of(op.output.shape[shard.dim])
    arguments: tuple[tuple[str, Any], ...] = (
        ("full", op.output.shape),
        ("dims", dims),
        ("order", order if len(order) == len(op.output.shape) else ()),
        ("gaps", gaps if op.target in IN_PLACE or op.target in FUSED_DROPOUTS else ()),
        ("dim", -1 if shard is None else shard.dim),
        ("outer", 1 if shard is None else shard.outer),
        ("batch", 1 if axis is None else axis.total),
        ("start", 0 if axis is None else axis.offset),
        ("rows", 1 if axis is None else axis.local),
        ("after", None),
        *((f"{a.name}_", op.arg(a.name)) for a in op.target._schema.arguments if a.name == "from"),
    )
    outputs: Placement = R if shard is None else shard
    chosen = alternative.inputs
    made = op.alternative({}, outputs, Rewrite(arguments=arguments, target=twin(op.target)))
    return Alternative(chosen, made.outputs, made.rewrite)
