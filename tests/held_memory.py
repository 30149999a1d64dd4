"""Memory that a process really holds, counted where torch's allocator gives it out and takes it back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once, beside what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found: Any = profiled.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the memory that tensors lie in, each counted once."""
    found = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def shared_bytes(ranks: int) -> int:
    """Of this rank's buffers for large values, which ranks of one host share: each has all ranks' open.

    Rows of parameters, which they see as well, count as parameters.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:fxdp " in os.readlink(f"/proc/self/fd/{name}"):
                status = os.stat(f"/proc/self/fd/{name}")
                found[status.st_ino] = status.st_size
    return sum(found.values()) // ranks
