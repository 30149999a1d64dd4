"""The transport of each collective: a process group, messages of the calling thread, or shared memory.

| transport | is | carries |
|---|---|---|
| `group` | gloo or NCCL | all, of any size |
| `messages` | sockets of the calling thread (`ranks/comms/messages.py`) | small values of static size |
| `memory` | shared memory of one host (`transport/shared_memory.py`) | sums; parameter shards of any size |
| `hosts` | memory in each host, gloo between them (`transport/host_sums.py`) | sums, if that is cheaper |

A message of a few KB between two ranks takes 10 us by message and 300 us by gloo, whose threads have to be
woken. A large sum between ranks of one host takes a quarter of gloo's time through shared memory. Between
hosts the speed of the links decides, which is measured when the ranks are joined. On CUDA NCCL carries
everything.
"""

from __future__ import annotations

from torch import fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.redistribution_entry import Transport
from fxdp.ir.redistributions import ORDERED, all_reduce_shards, redistribution_of
from fxdp.ir.types.mesh import REGATHER, Mesh
from fxdp.ir.types.placements import Partial, Replicate
from fxdp.ir.types.value_types import TensorType, is_static, type_bytes

MESSAGE_BYTES = 128 * 1024
"""The most bytes that one rank should send in a round of messages, over all receivers."""

NEIGHBOURS = 17
"""The most ranks to which one rank sends its sum: larger groups form a tree (`ranks/tree/tree_shape.py`)."""


def rotating_buffers(*, direct: bool) -> int:
    """Return the number of buffers of a rank for large values: one per step in flight, and the one in work.

    If all ranks read each other's values directly (`direct`), sums need no buffer.
    """
    return 2 if direct else 3


def fits_messages(size: int, ranks: int, *, summed: bool) -> bool:
    """Return whether a value of `size` bytes is small enough for a round of messages between `ranks`.

    In a tree, a sum sends one value on each connection, a gather the values of all ranks.
    """
    return size * (min(ranks - 1, NEIGHBOURS) if summed else ranks - 1) <= MESSAGE_BYTES


def transport_of(node: fx.Node, mesh: Mesh) -> Transport:
    """Return the transport of the collective `node`, equal on all ranks and for all batch sizes.

    Small values of static size travel by messages, larger sums through shared memory.
    """
    found, type_ = redistribution_of(node), meta(node).type
    if found is None or len(found.branches) == 1 or mesh.device_type != "cpu" or _is_part(found.axis, mesh):
        return "group"
    if node.target in ORDERED:  # of any size: the shared-memory transport sends small ones by messages
        return "memory" if mesh.shared_memory else "group"
    if not isinstance(type_, TensorType) or not is_static(type_):
        return "group"  # ranks with more samples would choose differently
    # moments are combined in rank order, so every rank gets all of them: a gather, though it takes P
    summed = found.takes is Partial and found.reduction(node) != "moments"
    if mesh.messages and fits_messages(type_bytes(type_), mesh.size, summed=summed):
        return "messages"
    if found.reduction(node) != "sum":
        return "group"
    return "memory" if mesh.shared_memory else "hosts" if mesh.host_sums else "group"


def _is_part(axis: str | None, mesh: Mesh) -> bool:
    """Return whether an axis has only some of the data ranks, which messages and memory join."""
    return axis == REGATHER or (axis is not None and len(mesh.axes) > 1)


def group_of(node: fx.Node, mesh: Mesh) -> str:
    """Return the name of the group that carries the collective `node`."""
    if transport_of(node, mesh) != "group":
        return mesh.group("messages")
    found = redistribution_of(node)
    assert found is not None
    if node.target in ORDERED or node.target is all_reduce_shards:
        # their order is fixed by data dependencies, that of ordinary collectives is not: separate groups
        return mesh.group("rows", found.axis)
    # so gradients and the forward's collectives do not wait for each other
    reduces = meta(node).backward and found.gives is Replicate and found.takes is Partial
    return mesh.group("reduce" if reduces else "data", found.axis)


def transport_name(node: fx.Node, mesh: Mesh) -> str:
    """Return the name of the transport of the collective `node`, for users.

    One of `gloo`, `nccl`, `messages`, `memory`, or `memory and gloo` if both take part in each sum.
    """
    way = transport_of(node, mesh)
    return {"group": mesh.backend, "hosts": f"memory and {mesh.backend}"}.get(way, way)
