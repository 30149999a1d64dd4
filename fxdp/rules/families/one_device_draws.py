"""Random numbers as one device would draw them: every rank draws those of the whole batch and keeps its own.

A generator is a sequence, so the numbers of a rank's samples are known only once those before them have
been drawn; drawing is local, and nothing is sent. Each op of the family has a twin in the `fxdp` library that
takes the whole shape and the rank's range as well (`ir/ops/whole_draws.py`).

How many numbers an op takes must not depend on values that other ranks hold. Bernoulli, dropout, normal and
multinomial draws take as many whatever they are given; those of `_BY_VALUE` are gathered and drawn whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxdp.ir.ops.whole_draws import IN_PLACE, UNREAD, twin
from fxdp.ir.placements import Placement, R, Shard
from fxdp.ir.sizes import LOCAL, OFFSET, B
from fxdp.rules.registry import Alternative, Op, Rewrite, registry

_BY_VALUE = frozenset(
    {"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise_functional"}
)
_IN_ORDER = frozenset({"rrelu_with_noise_functional"})
"""Ops that draw in the order of the dims, however their operands lie; their noise must lie so, too."""


def drawn_whole(
    op: Op, order: tuple[int, ...], gaps: tuple[int, ...], *, one_rank: bool
) -> Iterator[Alternative]:
    """The ways to draw `op` as one device would: kept in parts for nothing, or whole."""
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
            if isinstance(shard, Shard) and all(p == shard or p is None for p in alternative.outputs):
                yield _kept(op, alternative, shard, order, gaps)
    if found.name == "drawn_like":
        yield _kept(op, op.alternative({o.index: None for o in op.operands}), None, order, gaps)
    else:
        yield _kept(op, op.alternative(), None, order, gaps)


def _kept(
    op: Op, alternative: Alternative, shard: Shard | None, order: tuple[int, ...], gaps: tuple[int, ...]
) -> Alternative:
    unread = registry[op.target].name == "drawn_like"
    dims = tuple(UNREAD if unread else p.dim if isinstance(p, Shard) else -1 for p in alternative.inputs)
    arguments: tuple[tuple[str, Any], ...] = (
        ("whole", op.output.shape),
        ("dims", dims),
        ("order", order if len(order) == len(op.output.shape) else ()),
        ("gaps", gaps if op.target in IN_PLACE else ()),
        ("dim", -1 if shard is None else shard.dim),
        ("outer", 1 if shard is None else shard.outer),
        ("batch", B if shard is not None else 1),
        ("start", OFFSET if shard is not None else 0),
        ("rows", LOCAL if shard is not None else 1),
        ("after", None),
    )
    outputs: Placement = R if shard is None else shard
    chosen = alternative.inputs
    made = op.alternative({}, outputs, Rewrite(arguments=arguments, target=twin(op.target)))
    return Alternative(chosen, made.outputs, made.rewrite)
