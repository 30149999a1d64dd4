"""Bytes that a rank really hands over in a step, counted where they leave."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxdp.ir.ops.packed_sums import start_sum, start_sums
from fxdp.ir.ops.parameter_shards import publish_shards, start_all_gather_shards, start_reduce_scatter_shards
from fxdp.runtime import p2p

_c10d = torch.ops._c10d_functional


@dataclass
class Counted:
    """What left in a step, in bytes of full values as a plan counts them: by collectives, and by sends."""

    collectives: list[int] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)


class _Listener(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = _size(func, args)
        if size is not None:
            self.counted.collectives.append(size)
        return func(*args, **(kwargs or {}))


def _size(func: Any, args: Any) -> int | None:
    """The bytes of the full value that an op reduces or puts together."""
    if func in (_c10d.all_reduce.default, _c10d.broadcast.default, _c10d.reduce_scatter_tensor.default):
        return int(args[0].nbytes)
    if func in (start_sum, start_sums):
        return sum(int(value.nbytes) for value in args[0])
    if func is _c10d.all_gather_into_tensor.default:
        # each rank's moments are one value, which all of them combine to another of that size
        return int(args[0].nbytes) * (1 if _is_called_by("start_moments") else args[1])
    if func in (start_all_gather_shards, publish_shards, start_reduce_scatter_shards):
        values, sizes, world = args[:3]
        return math.prod((sum(sizes), world, values[0].itemsize))
    return None


def _is_called_by(name: str) -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == name:
            return True
    return False


@contextlib.contextmanager
def counted_bytes() -> Iterator[Counted]:
    """Inside, everything that leaves this rank is counted."""
    counted, isend = Counted(), p2p.dist.isend

    def send(value: Tensor, *args: Any, **options: Any) -> Any:
        counted.sends.append(value.nbytes)
        return isend(value, *args, **options)

    with mock.patch.object(p2p.dist, "isend", send), _Listener(counted):
        yield counted
