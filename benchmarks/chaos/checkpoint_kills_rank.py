"""What one rank of `checkpoint_kills.py` does: save on and on until it is killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fxdp

RANKS = 2


def small_model() -> fxdp.CompiledModule:
    """A sharded model of half a megabyte."""
    return fxdp.compile(nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 2)), strategy="shard")


def fill(compiled: fxdp.CompiledModule, step: int) -> None:
    """Let every value be the number of a step."""
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.fill_(step)


def save_until_killed(path: Path, seconds: float, killed: int) -> None:
    """Save on and on; so many seconds after it begins this rank is killed, if it is that one or all are."""
    compiled = small_model()
    step = fxdp.load(path, compiled)
    if killed in (dist.get_rank(), RANKS):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        step += 1
        fill(compiled, step)
        fxdp.save(path, compiled, step=step)
