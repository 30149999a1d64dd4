"""The operations that fxdp inserts into a graph, and all that anybody asks of them, in one table.

The functions are names, not code: they stand in a graph from their birth to emission, and calling one is an
error. An entry of `TABLE` says of one of them what it turns into what, its price, what it does to the values
of a list of ranks (the oracle), and the functions that start and finish it in an emitted program.

| function | converts | by |
|---|---|---|
| `all_reduce(x, op)` | P -> R | the sum over ranks, their extremum, or the combination of their moments |
| `reduce_scatter(x, dim, outer, inner)` | P -> S | each rank gets its part of the sum |
| `all_gather(x, dim, outer, inner)` | S -> R | the concatenation of the ranks' parts |
| `broadcast(x)` | ranks' own draws -> R | the value of rank 0 |
| `shard(x, dim, outer)` | R -> S | a slice |
| `partial(x)` | R -> P | rank 0 keeps the value, others hold zeros |
| `wait(pending)` | | the result of one that communicates |

The sharded dim's size is `outer * B * inner`. All take `axis=`, a data axis of the mesh along which alone
they convert; without it they do along all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.errors import FxdpError, PlacementError
from fxdp.ir.ops import collectives
from fxdp.ir.placements import Partial, Placement, R, Replicate, Shard
from fxdp.ir.sizes import batch_factor, exact_quotient
from fxdp.ir.types import TensorType

# -- the names ---------------------------------------------------------------------------------------------


def _not_executable(name: str) -> NoReturn:
    raise FxdpError(f"`{name}` is lowered at emission and cannot be called; this is a bug in fxdp")


def all_reduce(value: Any, op: str, *, axis: str | None = None) -> Any:
    """Start summing a Partial value over the ranks; `wait` for it."""
    _not_executable("all_reduce")


def reduce_scatter(value: Any, dim: int, outer: int, inner: int, *, axis: str | None = None) -> Any:
    """Start summing a Partial value of which each rank gets its part; `wait` for it."""
    _not_executable("reduce_scatter")


def all_gather(value: Any, dim: int, outer: int, inner: int, *, axis: str | None = None) -> Any:
    """Start gathering the ranks' parts into the whole value; `wait` for it."""
    _not_executable("all_gather")


def broadcast(value: Any, *, axis: str | None = None) -> Any:
    """Start sending rank 0's value to all ranks; `wait` for it."""
    _not_executable("broadcast")


def shard(value: Any, dim: int, outer: int, *, axis: str | None = None) -> Any:
    """This rank's part of a replicated value."""
    _not_executable("shard")


def partial(value: Any, *, axis: str | None = None) -> Any:
    """The value on rank 0 and zeros on others: terms of a sum."""
    _not_executable("partial")


def wait(pending: Any) -> Any:
    """The finished result of a collective; exactly one per collective."""
    _not_executable("wait")


# -- what is asked of one ----------------------------------------------------------------------------------


class Emission(Protocol):
    """What the functions of an emitted program are called with, beside the value itself."""

    group: str
    """The name of the process group that carries the value."""
    world: int
    """How many ranks the group joins."""
    index: int
    """This rank's place among them, or the part's where micro-batches split the batch further."""
    dtype: torch.dtype

    def size(self, name: str) -> fx.Node:
        """The size slot of this name."""

    def largest(self) -> fx.Node | None:
        """The size slot of the largest part; None where all are equal."""

    def rows(self) -> fx.Node | None:
        """Where the real rows of gathered, padded parts lie; None where all are equal."""


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of an emitted program and its arguments."""

Way: TypeAlias = Literal["group", "messages", "memory"]
"""What carries a value: the mesh's process group, messages of the calling thread, memory that ranks share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """All there is to know of one function of this file.

    Attributes
    ----------
    target : the function.
    takes, gives : the kinds of placement that it turns into one another.
    reduces : the one reduction of Partial values that it can do; empty where its argument names it.
    arguments : its arguments after the value, from type and both placements.
    price : bytes that a rank sends, to a factor common to all, for a value of so many bytes; the second
        number is what is sent if the value is gathered where it is smallest, before a cast or an expansion.
    on_ranks : every rank's result, from all ranks' values, their batch sizes, and the arguments.
    start : the function that starts it in an emitted program, or does all of it.
    finish : the function that waits, given what is pending; None for what is local.
    words : what becomes of a value that travels so, in a report; empty for what is local.
    ways : how it may travel on CPU if the value's size is fixed; else by the group.
    axis : along which data axis; None: all.
    """

    target: Callable[..., Any]
    takes: type[Placement]
    gives: type[Placement]
    arguments: Callable[[TensorType, Placement, Placement], tuple[Any, ...]]
    price: Callable[[float, float], float]
    on_ranks: Callable[..., list[Tensor]]
    start: Callable[..., Call]
    finish: Callable[..., Call] | None = None
    words: str = ""
    reduces: str = ""
    ways: tuple[Way, ...] = ("group",)
    axis: str | None = None

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange something, so that a `wait` belongs to it."""
        return self.finish is not None

    def converts(self, have: Placement, want: Placement) -> bool:
        """Whether it turns the one into the other."""
        known = not isinstance(have, Partial) or self.reduces in ("", have.op)
        return isinstance(have, self.takes) and isinstance(want, self.gives) and known

    def reduction(self, node: fx.Node) -> Any:
        """How `node`, a call of it, reduces a Partial value."""
        return self.reduces or node.args[1]


_LOCAL_STEP = 1e-3  # slicing or masking moves no byte, but is not nothing


def _nothing(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    return ()


def _reduction(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    assert isinstance(have, Partial)
    return (have.op,)


def _cut(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    assert isinstance(want, Shard)
    return want.dim, want.outer


def _factors(type_: TensorType, have: Placement, want: Placement) -> tuple[Any, ...]:
    """The sharded dim and its factors around the batch: `size == outer * B * inner`."""
    sharded = want if isinstance(want, Shard) else have
    assert isinstance(sharded, Shard)
    factor = batch_factor(type_.shape[sharded.dim])
    inner = None if factor is None else exact_quotient(factor, sharded.outer)
    if inner is None:
        raise PlacementError(f"a value of shape {type_.shape} cannot be {sharded}; this is a bug in a rule")
    return sharded.dim, sharded.outer, inner


def _start_all_reduce(at: Emission, value: fx.Node, op: str) -> Call:
    if op == "moments":  # every rank combines all of them, in rank order
        return collectives.start_moments, (value, at.world, at.group)
    return collectives.start_all_reduce, (value, op, at.group)


def _finish_all_reduce(at: Emission, pending: fx.Node, op: str) -> Call:
    if op == "moments":
        return collectives.finish_moments, (pending, at.world)
    if op in ("max", "min"):
        return collectives.finish_extremum, (pending, at.dtype)
    return collectives.finish, (pending,)


TABLE: tuple[Conversion, ...] = (
    Conversion(
        target=all_reduce, takes=Partial, gives=Replicate, arguments=_reduction,
        price=lambda size, gathered: 2 * size,
        on_ranks=collectives.all_reduced,
        start=_start_all_reduce, finish=_finish_all_reduce,
        words="reduced whole", ways=("group", "messages", "memory"),
    ),
    Conversion(
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
    Conversion(
        target=all_gather, takes=Shard, gives=Replicate, arguments=_factors,
        # a whole value means a whole batch's work on every rank, a part does not
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
    Conversion(
        target=broadcast, takes=Replicate, gives=Replicate, arguments=_nothing,
        price=lambda size, gathered: size,
        on_ranks=collectives.broadcasted,
        start=lambda at, value: (collectives.start_broadcast, (value, at.group)),
        finish=lambda at, pending: (collectives.finish, (pending,)),
        words="drawn once for all",
    ),
    Conversion(
        target=shard, takes=Replicate, gives=Shard, arguments=_cut,
        price=lambda size, gathered: _LOCAL_STEP,
        on_ranks=collectives.sharded,
        start=lambda at, value, dim, outer: (
            collectives.shard, (value, dim, outer, at.size("B"), at.size("offset"), at.size("b")),
        ),
    ),
    Conversion(
        target=partial, takes=Replicate, gives=Partial, arguments=_nothing,
        price=lambda size, gathered: _LOCAL_STEP,
        on_ranks=collectives.made_partial,
        start=lambda at, value: (collectives.partial, (value, at.index)),
    ),
)  # fmt: skip
"""One entry per conversion; nothing else knows them one by one."""

_BY_TARGET = {conversion.target: conversion for conversion in TABLE}

COLLECTIVES = frozenset(c.target for c in TABLE if c.communicates)
"""The functions that communicate; each has exactly one `wait`."""

CONVERSIONS = frozenset(_BY_TARGET) | {wait}
"""All functions of this file."""

LOCAL = frozenset(c.target for c in TABLE if not c.communicates)
"""The functions that make something of a value that each rank has whole."""


def conversion_of(node: fx.Node) -> Conversion | None:
    """The entry of the conversion that `node` is, along its axis; None for a `wait` and all other nodes."""
    found = _BY_TARGET.get(node.target)  # type: ignore[arg-type]
    axis = node.kwargs.get("axis") if found is not None else None
    return replace(found, axis=axis) if found is not None and isinstance(axis, str) else found


@lru_cache(maxsize=65536)
def route(have: Placement, want: Placement) -> tuple[Conversion, ...]:
    """The conversions that turn `have` into `want`, another placement: one, or two by way of R.

    Of extrema and moments no part can be had alone, so `P(max) -> S` is an all-reduce and a slice.
    """
    for conversion in TABLE:  # a direct way is always cheaper: what goes by R brings the whole to every rank
        if conversion.converts(have, want):
            return (conversion,)
    if isinstance(have, Replicate) or isinstance(want, Replicate):
        raise PlacementError(f"no conversion turns {have} into {want}; this is a bug in a rule")
    return (*route(have, R), *route(R, want))


def price(have: Placement, want: Placement, size: float, gathered: float) -> float:
    """Bytes that a rank sends to turn `have` into `want`, to a factor common to all (see `Conversion`)."""
    return sum(conversion.price(size, gathered) for conversion in route(have, want))
