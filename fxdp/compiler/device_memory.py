"""The memory of this machine for which a program may be planned."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fxdp.settings import Settings

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_OURS = 0.9
"""Share of memory for tensors; the process, torch itself and gaps between tensors take the rest."""


def device_memory(device_type: str) -> int:
    """Return the bytes of this process's GPU, or on a CPU of the host, which all local ranks share."""
    if device_type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1] * _OURS)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(host, _container_memory() or host) * _OURS)


def own_memory(device_type: str) -> int:
    """Return the bytes for one rank: `device_memory` divided by the ranks that torchrun started here.

    Outside torchrun the number of ranks is unknown, so one rank gets everything.
    """
    full, launch = device_memory(device_type), Settings.from_environment().launch
    if launch is None or device_type != "cpu":
        return full
    return full // max(launch.ranks_here, 1)


def _container_memory() -> int:
    """Return the memory limit of the container in bytes, or 0 without a limit."""
    try:
        said = _CGROUP.read_text().strip()
    except OSError:
        return 0
    return int(said) if said.isdigit() else 0
