"""Memory that a process really holds, counted where torch's allocator gives it out and takes it back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once, beside what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True) as profiled:
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


def bytes_at_rest() -> int:
    """Of all memory that tensors lie in, whoever holds them, but for buffers that ranks share.

    The buckets of `DistributedDataParallel` are among it, as their views have been Python's once.
    """
    gc.collect()
    shared = [place for place, _ in _shared_buffers()]
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    real = [each for each in tensors if not isinstance(each, FakeTensor) and each.device.type == "cpu"]
    return bytes_of(each for each in real if not any(_address(each) in place for place in shared))


def _address(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def resident_peak(step: Callable[[], Any]) -> int:
    """By how much this process grows during one step, at most, as the system counts its pages.

    Those that it shares with others are among them, and what libraries allocate by themselves.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # pages that are free already would be filled first
    before = _kilobytes("/proc/self/status", "VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # begins the highest anew
    step()
    return 1024 * (_kilobytes("/proc/self/status", "VmHWM:") - before)


def shared_pages() -> int:
    """Of the buffers that ranks of one host share, this rank's part: of a page that n of them map 1/n.

    Rows of parameters, which they see as well, count as parameters.
    """
    return sum(size for _, size in _shared_buffers())


def _shared_buffers() -> Iterator[tuple[range, int]]:
    """Where in this process each of them is, and this rank's part of it."""
    place = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            place = range(*(int(end, 16) for end in first.split("-"))) if "memfd:fxdp " in rest else None
        elif place is not None and first == "Pss:":
            yield place, 1024 * int(rest.split()[0])


def _kilobytes(path: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(name))


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
