"""Routes from one placement to another, by the redistributions of the table, and the price of a route."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fxdp.errors import PlacementError
from fxdp.ir.redistribution_entry import Redistribution
from fxdp.ir.redistributions import TABLE
from fxdp.ir.types.placements import ParamShard, Partial, Placement, R, Replicate


@lru_cache(maxsize=65536)
def route(have: Placement, want: Placement) -> tuple[Redistribution, ...]:
    """Return the redistributions from `have` to a different placement `want`: one, or two by way of R.

    No rank can get a part of an extremum or of moments alone, so `P(max) -> S` is an all-reduce and a slice.
    """
    if (
        isinstance(have, Partial)
        and have.op == "sum"
        and isinstance(want, ParamShard)
        and want != between(want)
    ):
        return (*route(have, between(want)), *route(between(want), want))
    for redistribution in TABLE:  # a direct way is always cheaper: by way of R every rank gets all
        if redistribution.converts(have, want):
            return (redistribution,)
    if isinstance(have, Replicate) or isinstance(want, Replicate):
        raise PlacementError(f"no redistribution turns {have} into {want}; this is a bug in a rule")
    return (*route(have, R), *route(R, want))


def between(want: ParamShard) -> ParamShard:
    """Return the intermediate placement of sums on the way to `want`, a shard along one of two data axes.

    This is a shard of terms, which are still to be reduced along the second axis.
    """
    return want if want.axis is None else replace(want, terms=True)


def price(have: Placement, want: Placement, size: float, gathered: float) -> float:
    """Return the bytes that a rank sends from `have` to `want`, up to a factor (see `Redistribution`)."""
    return sum(redistribution.price(size, gathered) for redistribution in route(have, want))
