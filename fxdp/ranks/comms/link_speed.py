"""How fast the ranks of a row sum values over a network: measured once, when they are joined."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fxdp.ir.link_cost import LinkCost
from fxdp.ranks.comms.channel import Channel

_ELEMENTS = 1 << 18  # 1 MiB, 85 ms at 100 Mbit/s: of 256 KiB the first packets of TCP took twice their time
_TRIES = 3  # of sums over hosts the first three make their buffers
_TRIES_OF_SMALL = 6  # they cost next to nothing, and one that waited for a processor hides what a byte costs
_CLEARLY = 0.9  # less would differ from start to start, and with it programs that are kept
_PAIR = struct.Struct("<dd")


def measured(sum_up: Callable[[Tensor], object], control: Channel) -> LinkCost:
    """The cost that the slowest rank sees; all ranks of the mesh must call this at the same point.

    `sum_up` sums a tensor over the ranks, in place.
    """
    small = _least_seconds(sum_up, torch.zeros(1), _TRIES_OF_SMALL)
    large = _least_seconds(sum_up, torch.zeros(_ELEMENTS), _TRIES)
    of_bytes = large - small if large > small else large  # else: no more than that
    own = _PAIR.pack(small, of_bytes / (4 * _ELEMENTS))
    latencies, costs = zip(*map(_PAIR.unpack, control.exchange(own)), strict=True)
    return LinkCost(max(latencies), max(costs))


def is_cheaper(one: LinkCost, other: LinkCost) -> bool:
    """Whether the one way to sum takes clearly less time than the other, for a value as was measured."""
    return one.seconds(4 * _ELEMENTS) < _CLEARLY * other.seconds(4 * _ELEMENTS)


def _least_seconds(sum_up: Callable[[Tensor], object], value: Tensor, tries: int) -> float:
    """Of so many sums, after one that opens connections."""
    seconds = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        sum_up(value)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
