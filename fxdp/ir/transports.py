"""Which way a collective travels: the mesh's process group, messages of the calling thread, or shared memory.

| way | is | carries |
|---|---|---|
| `group` | gloo or NCCL | all, of any size |
| `messages` | sockets of the calling thread (`ranks/comms/messages.py`) | small values of a fixed size |
| `memory` | what all ranks read, on one host (`ranks/comms/shared_memory.py`) | sums; rows of any size |
| `hosts` | memory in each host, gloo between them (`ranks/comms/host_sums.py`) | sums, if that is cheaper |

A message of a few KB between two ranks takes 10 us by message and 300 us by gloo, whose threads have to be
woken. A large sum between ranks of one host takes a quarter of gloo's time through memory that they see.
Of ranks on several hosts the links' speed decides, which is measured when they are joined. On CUDA everything
goes by NCCL.
"""

from __future__ import annotations

from torch import fx

from fxdp.ir.mesh import REGATHER, Mesh
from fxdp.ir.metadata import meta
from fxdp.ir.placements import Partial, Replicate
from fxdp.ir.redistribution_entry import Transport
from fxdp.ir.redistributions import ORDERED, all_reduce_shards, redistribution_of
from fxdp.ir.types import TensorType, is_static, type_bytes

MESSAGE_BYTES = 128 * 1024
"""The most bytes that one rank should send in a round of messages: its value, to each other rank."""

NEIGHBOURS = 17
"""To so many ranks one sends its sum at most: many ranks are a tree (`ranks/tree/tree_shape.py`)."""


def rotating_buffers(*, direct: bool) -> int:
    """How many buffers for large values a rank has: as many as steps are taken in them, and the one in work.

    Where all ranks read each other's values where they lie (`direct`), sums need none.
    """
    return 2 if direct else 3


def fits_messages(size: int, ranks: int, *, summed: bool) -> bool:
    """Whether a value of `size` bytes is small enough for a round between `ranks`.

    In a tree a sum is one value on each connection, a gather those of all ranks.
    """
    return size * (min(ranks - 1, NEIGHBOURS) if summed else ranks - 1) <= MESSAGE_BYTES


def transport_of(node: fx.Node, mesh: Mesh) -> Transport:
    """How the collective `node` travels; the same on all ranks and for all batch sizes.

    Values of a fixed size go by messages if they are small, else sums through shared memory.
    """
    found, type_ = redistribution_of(node), meta(node).type
    if found is None or len(found.branches) == 1 or mesh.device_type != "cpu" or _is_part(found.axis, mesh):
        return "group"
    if node.target in ORDERED:  # of any size: what is small goes by messages all the same
        return "memory" if mesh.shared_memory else "group"
    if not isinstance(type_, TensorType) or not is_static(type_):
        return "group"  # ranks with more samples than others would choose otherwise than these
    # moments are combined in rank order, so every rank gets those of all: a gather, though it takes P
    summed = found.takes is Partial and found.reduction(node) != "moments"
    if fits_messages(type_bytes(type_), mesh.size, summed=summed):
        return "messages"
    if found.reduction(node) != "sum":
        return "group"
    return "memory" if mesh.shared_memory else "hosts" if mesh.host_sums else "group"


def _is_part(axis: str | None, mesh: Mesh) -> bool:
    """Whether messages and shared memory, which join all data ranks, join more than the axis does."""
    return axis == REGATHER or (axis is not None and len(mesh.axes) > 1)


def group_of(node: fx.Node, mesh: Mesh) -> str:
    """The name of the group that carries the collective `node`."""
    if transport_of(node, mesh) != "group":
        return mesh.group("messages")
    found = redistribution_of(node)
    assert found is not None
    if node.target in ORDERED or node.target is all_reduce_shards:
        # their order is data, that of others is not: in one group a compiler could make the ranks differ
        return mesh.group("rows", found.axis)
    # gradients do not wait behind the forward's collectives, nor these behind them
    reduces = meta(node).backward and found.gives is Replicate and found.takes is Partial
    return mesh.group("reduce" if reduces else "data", found.axis)


def transport_name(node: fx.Node, mesh: Mesh) -> str:
    """What carries the collective `node`, in a user's words.

    `gloo`, `nccl`, `messages`, `memory`, or `memory and gloo` where both have a part in each sum.
    """
    way = transport_of(node, mesh)
    return {"group": mesh.backend, "hosts": f"memory and {mesh.backend}"}.get(way, way)
