"""Compare processor, threads and torch between ranks, on which the last bits of results depend."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

from fxdp.ranks.comms.channel import Channel

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "CPU part", "cpu")
"""Keys of a processor's name in Linux's cpuinfo: on x86, ARM and POWER."""


def are_alike(control: Channel, backend: str) -> bool:
    """Return whether all ranks of a mesh compute bitwise equal results; all ranks call this together."""
    return len(set(control.exchange(_processor(backend).encode()))) == 1


def _processor(backend: str) -> str:
    """Return a description of this rank's processor and torch, different where the last bits may differ."""
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
