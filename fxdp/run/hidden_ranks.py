"""What a script sees of its process: one device, and no torch.distributed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from fxdp.eager.data_ranks import DataRanks, data_ranks
from fxdp.settings.launch import Launch, hide_launch, see_one_gpu
from fxdp.torch_compat import hide_world, one_device_for_good


def join(launch: Launch) -> DataRanks:
    """Join the ranks, as the one with this place; a collective call."""
    see_one_gpu(launch.local_rank)
    here = launch.ranks_here or launch.world_size
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    return data_ranks(None, "cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def hide_ranks() -> Iterator[None]:
    """Hide the ranks from the code inside: torchrun's variables, the process group."""
    hide_launch()
    one_device_for_good(lambda _: True)
    with hide_world():
        yield
