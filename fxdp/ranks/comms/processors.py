"""Whether ranks compute the same bits of the same values: by their processor, threads and torch."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

from fxdp.ranks.comms.channel import Channel

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "CPU part", "cpu")
"""By which Linux tells a processor: on x86, ARM and POWER."""


def are_alike(control: Channel, backend: str) -> bool:
    """Whether all ranks of a mesh do; all of them call this at the same point."""
    return len(set(control.exchange(processor(backend).encode()))) == 1


def processor(backend: str) -> str:
    """What this rank computes with, in words that differ where last bits may."""
    own = [version("torch"), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()), _name()]
    if backend == "nccl":
        own.append(torch.cuda.get_device_name())
    return ", ".join(own)


def _name() -> str:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    found = next((value.strip() for key, value in told.items() if key.strip() in _NAMES), "")
    return f"{platform.machine()} {found}"
