"""The redistributions that fxdp inserts into a graph, in one table with all of their properties.

The functions are names, not code: they stay in a graph from insertion to emission, and calling one is an
error. Each entry of `TABLE` has the placements before and after, the price, the effect on the values of a
list of ranks (the oracle), and the functions that start and finish the redistribution in an emitted program.

| function | redistributes | by |
|---|---|---|
| `all_reduce(x, op)` | P -> R | the sum over ranks, their extremum, or the combination of their moments |
| `reduce_scatter(x, dim, outer, inner)` | P -> S | each rank gets its part of the sum |
| `all_gather(x, dim, outer, inner)` | S -> R | the concatenation of the ranks' parts |
| `broadcast(x)` | ranks' own draws -> R | the value of rank 0 |
| `exchange_sizes(numbers)` | ranks' numbers | the numbers of rows of all ranks |
| `shard(x, dim, outer)` | R -> S | a slice |
| `partial(x)` | R -> P | rank 0 keeps the value, all remaining ranks hold zeros |
| `all_gather_shards(x)` | Rows -> R | a sharded parameter in full |
| `reduce_scatter_shards(x)` | P -> Rows | each rank gets its rows of the sum |
| `all_reduce_shards(x)` | terms of Rows -> Rows | the sum along the mesh's second axis |
| `slice_shard(x)` | R -> Rows | a slice |
| `wait(pending)` | | the result of a collective |

The sharded dim's size is `outer * B * inner`. In buckets (`passes/bucket_parameters.py`), `all_gather_shards`
and `reduce_scatter_shards` take a list of values, the number of elements of each on a rank, and the values
that must be ready before the start; they return one flat value. All take `axis=`, the only data axis of the
mesh along which they redistribute; without it they redistribute along all data axes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from torch import fx

from fxdp.errors import FxdpError, PlacementError
from fxdp.ir.ops import collectives, exchanged_sizes
from fxdp.ir.ops import parameter_shards as rows
from fxdp.ir.redistribution_entry import Call, Emission, Redistribution
from fxdp.ir.types.mesh import REPLICATE
from fxdp.ir.types.placements import (
    ParamShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    has_terms,
    sharded_axis,
)
from fxdp.ir.types.sizes import batch_factor, exact_quotient
from fxdp.ir.types.value_types import TensorType

# -- the names ---------------------------------------------------------------------------------------------


def _not_executable(name: str) -> NoReturn:
    raise FxdpError(f"`{name}` is lowered at emission and cannot be called; this is a bug in fxdp")


def all_reduce(value: Any, op: str, *, axis: str | None = None) -> Any:
    """Start the reduction of a Partial value over the ranks; `wait` returns the result."""
    _not_executable("all_reduce")


def reduce_scatter(value: Any, dim: int, outer: int, inner: int, *, axis: str | None = None) -> Any:
    """Start the sum of a Partial value, scattered so that each rank gets a part; `wait` returns the part."""
    _not_executable("reduce_scatter")


def all_gather(value: Any, dim: int, outer: int, inner: int, *, axis: str | None = None) -> Any:
    """Start gathering the ranks' parts into the full value; `wait` returns the result."""
    _not_executable("all_gather")


def broadcast(value: Any, *, axis: str | None = None) -> Any:
    """Start sending rank 0's value to all ranks; `wait` returns the result."""
    _not_executable("broadcast")


def exchange_sizes(numbers: Any, *, axis: str | None = None) -> Any:
    """Start telling all ranks this rank's numbers of rows (`fxdp/ir/ops/exchanged_sizes.py`)."""
    _not_executable("exchange_sizes")


def shard(value: Any, dim: int, outer: int, *, axis: str | None = None) -> Any:
    """Slice this rank's part from a replicated value."""
    _not_executable("shard")


def partial(value: Any, *, axis: str | None = None) -> Any:
    """Keep the value on rank 0 and zeros on all remaining ranks, as terms of a sum."""
    _not_executable("partial")


def all_gather_shards(value: Any, each: Any = (), after: Any = (), *, axis: str | None = None) -> Any:
    """Start gathering the ranks' shards of one or several parameters; `wait` returns the full values."""
    _not_executable("all_gather_shards")


def reduce_scatter_shards(value: Any, each: Any = (), after: Any = (), *, axis: str | None = None) -> Any:
    """Start the sum of one or several Partial values, scattered as parameter shards.

    `wait` returns the shards.
    """
    _not_executable("reduce_scatter_shards")


def all_reduce_shards(value: Any, *, axis: str | None = None) -> Any:
    """Start the sum of parameter shards over the ranks that hold equal shards; `wait` returns the result."""
    _not_executable("all_reduce_shards")


def slice_shard(value: Any, *, axis: str | None = None) -> Any:
    """Slice this rank's parameter shard from a replicated value."""
    _not_executable("slice_shard")


def wait(pending: Any) -> Any:
    """Return the finished result of a collective; exactly one `wait` per collective."""
    _not_executable("wait")


# -- the properties of each ----------------------------------------------------------------------------------

_LOCAL_STEP = 1e-3  # slicing or masking moves no bytes, but is not free


def _nothing(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    return ()


def _reduction(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    assert isinstance(have, Partial)
    return (have.op,)


def _cut(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    assert isinstance(want, Shard)
    return want.dim, want.outer


def _factors(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    """Return the sharded dim and its factors around the batch: `size == outer * B * inner`."""
    sharded = want if isinstance(want, Shard) else have
    assert isinstance(sharded, Shard)
    factor = batch_factor(type_.shape[sharded.dim])
    inner = None if factor is None else exact_quotient(factor, sharded.outer)
    if inner is None:
        raise PlacementError(f"a value of shape {type_.shape} cannot be {sharded}; this is a bug in a rule")
    return sharded.dim, sharded.outer, inner


def _start_all_reduce(at: Emission, value: fx.Node, op: str) -> Call:
    if op == "moments":  # every rank combines the moments of all, in rank order
        return collectives.start_moments, (value, at.world, at.group)
    return collectives.start_all_reduce, (value, op, at.group)


def _finish_all_reduce(at: Emission, pending: fx.Node, op: str) -> Call:
    if op == "moments":
        return collectives.finish_moments, (pending, at.world)
    if op in ("max", "min"):
        return collectives.finish_extremum, (pending, at.dtype)
    return collectives.finish, (pending,)


TABLE: tuple[Redistribution, ...] = (
    Redistribution(
        target=all_reduce, takes=Partial, gives=Replicate, arguments=_reduction,
        price=lambda size, gathered: 2 * size,
        on_ranks=collectives.all_reduced,
        start=_start_all_reduce, finish=_finish_all_reduce,
        words="reduced entire", branches=("group", "messages", "memory", "hosts"),
    ),
    Redistribution(
        target=reduce_scatter, takes=Partial, gives=Shard, arguments=_factors, reduces="sum",
        price=lambda size, gathered: size,
        on_ranks=collectives.reduce_scattered,
        start=lambda at, value, dim, outer, inner: (
            collectives.start_reduce_scatter,
            (value, dim, outer, inner, at.world, at.largest(), at.rows(), at.group),
        ),
        finish=lambda at, pending, dim, outer, inner: (
            collectives.finish_reduce_scatter, (pending, dim, at.size("b")),
        ),
        words="reduced and split",
    ),
    Redistribution(
        target=all_gather, takes=Shard, gives=Replicate, arguments=_factors,
        # a full value means the work of the global batch on every rank
        price=lambda size, gathered: gathered + _LOCAL_STEP,
        on_ranks=collectives.all_gathered,
        start=lambda at, value, dim, outer, inner: (
            collectives.start_all_gather, (value, dim, outer, inner, at.world, at.largest(), at.group),
        ),
        finish=lambda at, pending, dim, outer, inner: (
            collectives.finish_all_gather, (pending, dim, at.rows()),
        ),
        words="gathered",
    ),
    Redistribution(
        target=broadcast, takes=Replicate, gives=Replicate, arguments=_nothing,
        price=lambda size, gathered: size,
        on_ranks=collectives.broadcasted,
        start=lambda at, value: (collectives.start_broadcast, (value, at.group)),
        finish=lambda at, pending: (collectives.finish, (pending,)),
        words="drawn once for all",
    ),
    Redistribution(
        target=exchange_sizes, takes=Replicate, gives=Replicate, arguments=_nothing,
        price=lambda size, gathered: size, on_ranks=exchanged_sizes.of_ranks,
        suits=lambda have, want: False,  # numbers have no placement
        start=lambda at, sizes: (exchanged_sizes.start, (sizes, at.device, at.world, at.group)),
        finish=lambda at, pending: (exchanged_sizes.finish, (pending, at.world, at.index)),
        words="sizes exchanged",
    ),
    Redistribution(
        target=shard, takes=Replicate, gives=Shard, arguments=_cut,
        price=lambda size, gathered: _LOCAL_STEP,
        on_ranks=collectives.sharded,
        start=lambda at, value, dim, outer: at.part(value, dim, outer),
    ),
    Redistribution(
        target=partial, takes=Replicate, gives=Partial, arguments=_nothing,
        price=lambda size, gathered: _LOCAL_STEP,
        on_ranks=collectives.made_partial,
        start=lambda at, value: (collectives.partial, (value, at.number)),
    ),
    Redistribution(
        target=all_gather_shards, takes=ParamShard, gives=Replicate, arguments=_nothing,
        price=lambda size, gathered: gathered,
        on_ranks=rows.unsharded_values,
        start=lambda at, x, each, after: (
            rows.publish_shards if at.shown else rows.start_all_gather_shards, (x, each, at.world, at.group,
            after),
        ),
        finish=lambda at, pending, each, after: (collectives.finish, (pending,)),
        words="gathered for use", branches=("group", "memory"),
        along=lambda have, want: sharded_axis(have),
        suits=lambda have, want: not has_terms(have),
    ),
    Redistribution(
        target=reduce_scatter_shards, takes=Partial, gives=ParamShard, arguments=_nothing, reduces="sum",
        price=lambda size, gathered: size,
        on_ranks=rows.reduced_shards,
        start=lambda at, x, each, after: (rows.start_reduce_scatter_shards, (x, each, at.world, at.group,
        after)), finish=lambda at, pending, each, after: (collectives.finish, (pending,)),
        words="reduced and scattered", branches=("group", "memory"),
        along=lambda have, want: sharded_axis(want),
        # with two axes, a sum along one is a term of the full sum
        suits=lambda have, want: has_terms(want) == (sharded_axis(want) is not None),
    ),
    Redistribution(
        target=all_reduce_shards, takes=ParamShard, gives=ParamShard, arguments=_nothing,
        price=lambda size, gathered: 2 * size,
        on_ranks=rows.all_reduced_shards,
        start=lambda at, value: (collectives.start_all_reduce, (value, "sum", at.group)),
        finish=lambda at, pending: (collectives.finish, (pending,)),
        words="reduced by replicas",
        along=lambda have, want: REPLICATE,
        suits=lambda have, want: has_terms(have) and not has_terms(want),
    ),
    Redistribution(
        target=slice_shard, takes=Replicate, gives=ParamShard, arguments=_nothing,
        price=lambda size, gathered: _LOCAL_STEP,
        on_ranks=rows.sliced_shards,
        start=lambda at, value: (rows.slice_shard, (value, at.world, at.index)),
        along=lambda have, want: sharded_axis(want),
        suits=lambda have, want: not has_terms(want),
    ),
)  # fmt: skip
"""One entry per redistribution; no code outside of this table tells entries apart."""

_BY_TARGET = {redistribution.target: redistribution for redistribution in TABLE}

COLLECTIVES = frozenset(c.target for c in TABLE if c.communicates)
"""The functions that communicate; each has exactly one `wait`."""

REDISTRIBUTIONS = frozenset(_BY_TARGET) | {wait}
"""All functions of this file."""

ORDERED = frozenset({all_gather_shards, reduce_scatter_shards})
"""The redistributions that take, as last argument, values that must be ready before the start.

Above all, this is the previous start.
"""

LOCAL = frozenset(c.target for c in TABLE if not c.communicates)
"""The functions that compute a local value from a replicated one, without communication."""


def redistribution_of(node: fx.Node) -> Redistribution | None:
    """Return the entry of a redistribution node, along its axis; None for a `wait` and all ordinary nodes."""
    found = _BY_TARGET.get(node.target)  # type: ignore[arg-type]
    return replace(found, axis=axis) if found is not None and (axis := axis_of(node)) else found


def axis_of(redistribution: fx.Node) -> str | None:
    """Return the data axis of a redistribution; None: all data axes."""
    axis = redistribution.kwargs.get("axis")
    return axis if isinstance(axis, str) else None
