"""Which way a collective travels: the mesh's process group, or messages of the calling thread.

A message of a few KB between two ranks takes 10 us by message and 300 us by gloo, whose threads have to be
woken; a large value goes faster, and in the background, by gloo. On CUDA everything goes by NCCL.
"""

from __future__ import annotations

from math import prod
from typing import Literal, TypeAlias

from torch import fx

from fxdp import ir
from fxdp.annotations import TensorType, note

__all__ = ["MESSAGE_BYTES", "Way", "way_of"]

Way: TypeAlias = Literal["group", "messages"]

MESSAGE_BYTES = 128 * 1024
"""The most bytes that one rank sends for one collective by messages: its value, to each other rank."""


def way_of(node: fx.Node, ranks: int, device_type: str) -> Way:
    """How the collective `node` travels between `ranks`; the same on all ranks and for all batch sizes.

    All-reduces whose value has a fixed size and is small go by messages.
    """
    type_ = note(node).type
    if node.target is not ir.all_reduce or device_type != "cpu" or not isinstance(type_, TensorType):
        return "group"
    if not all(isinstance(n, int) for n in type_.shape):
        return "group"
    sent = prod(int(n) for n in type_.shape) * type_.dtype.itemsize * (ranks - 1)
    return "messages" if sent <= MESSAGE_BYTES else "group"
