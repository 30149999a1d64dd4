"""How much memory a program may plan with on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fxdp.settings import Settings

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_OURS = 0.9
"""The share for tensors: the process, torch itself and gaps between tensors take the rest."""


def device_memory(device_type: str) -> int:
    """Bytes of this process's GPU, or without one of the host, which its ranks share."""
    if device_type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1] * _OURS)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(host, _container_memory() or host) * _OURS)


def own_memory(device_type: str) -> int:
    """The same without the share of the other ranks that torchrun has started on this host.

    A plan outside of torchrun cannot know how many ranks there will be on a host: it has it for itself.
    """
    full, launch = device_memory(device_type), Settings.from_environment().launch
    if launch is None or device_type != "cpu":
        return full
    return full // max(launch.ranks_here, 1)


def _container_memory() -> int:
    """What a container may have; 0 where nobody says."""
    try:
        said = _CGROUP.read_text().strip()
    except OSError:
        return 0
    return int(said) if said.isdigit() else 0
