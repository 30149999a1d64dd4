"""Which way a collective travels: the mesh's process group, messages of the calling thread, or shared memory.

A message of a few KB between two ranks takes 10 us by message and 300 us by gloo, whose threads have to be
woken. A large sum between ranks of one host takes a quarter of gloo's time through memory that they share
(`links/shared_memory.py`). On CUDA everything goes by NCCL.
"""

from __future__ import annotations

from math import prod
from typing import Literal, TypeAlias

from torch import fx

from fxdp.ir import conversions
from fxdp.ir.notes import note
from fxdp.ir.types import TensorType
from fxdp.ranks.links import fits_messages

__all__ = ["Way", "way_of"]

Way: TypeAlias = Literal["group", "messages", "memory"]


def way_of(node: fx.Node, ranks: int, device_type: str, shared_memory: bool = False) -> Way:
    """How the collective `node` travels between `ranks`; the same on all ranks and for all batch sizes.

    All-reduces whose value has a fixed size go by messages if it is small, else through `shared_memory`.
    """
    type_ = note(node).type
    if node.target is not conversions.all_reduce or device_type != "cpu" or not isinstance(type_, TensorType):
        return "group"
    if not all(isinstance(n, int) for n in type_.shape):
        return "group"
    if fits_messages(prod(int(n) for n in type_.shape) * type_.dtype.itemsize, ranks):
        return "messages"
    return "memory" if shared_memory and node.args[1] == "sum" else "group"
