"""What one step hands to other ranks and how much memory it takes at most, as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Counted:
    """Bytes of one step on this rank.

    `handed` to the backend's sends and collectives; `peak` of live tensors beyond those before the step.
    """

    handed: int
    peak: int


def count(step: Callable[[], object]) -> Counted:
    """Run a step under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as seen:
        step()
    handed = live = peak = 0
    prefix = f"{dist.get_backend()}:"
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name().startswith(prefix) and not event.name().endswith(("recv", "barrier")):
            pairs = zip(event.shapes(), event.dtypes(), strict=True)
            handed += sum(tensor_bytes(shape, dtype) for shape, dtype in pairs)
    return Counted(handed, peak)


def tensor_bytes(shape: list[int], dtype: str) -> int:
    """The bytes of a tensor as the profiler describes it."""
    sizes = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long": 8, "long int": 8, "int": 4}
    return torch.Size(shape).numel() * sizes.get(dtype, 1)
