"""Measure the speed of sums over the network between the ranks of a row, once at start-up."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fxdp.ir.network.link_cost import LinkCost
from fxdp.ranks.comms.channel import Channel

_ELEMENTS = 1 << 18  # 1 MiB, 85 ms at 100 Mbit/s: with 256 KiB the first TCP packets took twice their time
_TRIES = 3  # the first three sums over hosts make buffers
_TRIES_OF_SMALL = 6  # cheap, and one delayed by the scheduler would hide the cost per byte
_CLEARLY = 0.9  # a smaller gain would vary from start to start, and with it cached programs
_PAIR = struct.Struct("<dd")


def measured(sum_up: Callable[[Tensor], object], control: Channel) -> LinkCost:
    """Return the cost that the slowest rank measures; all ranks of the mesh call this together.

    `sum_up` sums a tensor over the ranks, in place.
    """
    small = _least_seconds(sum_up, torch.zeros(1), _TRIES_OF_SMALL)
    large = _least_seconds(sum_up, torch.zeros(_ELEMENTS), _TRIES)
    of_bytes = large - small if large > small else large  # else an upper bound
    own = _PAIR.pack(small, of_bytes / (4 * _ELEMENTS))
    latencies, costs = zip(*map(_PAIR.unpack, control.exchange(own)), strict=True)
    return LinkCost(max(latencies), max(costs))


def is_cheaper(one: LinkCost, other: LinkCost) -> bool:
    """Return whether one method takes clearly less time than the other, for a value of the measured size."""
    return one.seconds(4 * _ELEMENTS) < _CLEARLY * other.seconds(4 * _ELEMENTS)


def _least_seconds(sum_up: Callable[[Tensor], object], value: Tensor, tries: int) -> float:
    """Return the least time of `tries` sums, after one that opens connections."""
    seconds = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        sum_up(value)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
