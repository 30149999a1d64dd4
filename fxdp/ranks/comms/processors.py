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


def are_alike(control: Channel, device_type: str) -> bool:
    """Return whether all ranks of a mesh compute bitwise equal results; all ranks call this together."""
    return len(set(control.exchange(repr(processor(device_type)).encode()))) == 1


def processor(device_type: str) -> dict[str, str]:
    """Return torch, processor and threads of this rank, on which the last bits of its results depend."""
    found = {
        "torch": version("torch"),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "processor": _name(),
    }
    if device_type == "cuda":
        found["GPU"] = torch.cuda.get_device_name()
    return found


def _name() -> str:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    found = next((value.strip() for key, value in told.items() if key.strip() in _NAMES), "")
    return f"{platform.machine()} {found}"
