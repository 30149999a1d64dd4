"""Internals of torch's process groups and functional collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    _broadcast_coalesced,
    _register_process_group,
    _register_work,
    _resolve_process_group,
)
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    TCPStore,
    Work,
    distributed_c10d,
)
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

__all__ = [
    "DEFAULT_GROUP",
    "PrefixStore",
    "TCPStore",
    "Work",
    "broadcast_coalesced",
    "collectives_begun",
    "end_lone_group",
    "flatten_state_dict",
    "has_lone_group",
    "hide_world",
    "new_named_group",
    "register_group",
    "room_to_send",
    "start_gathers",
    "start_scatter",
    "start_sum",
    "start_sums",
    "start_zero_copy",
    "world_group",
]  # fmt: skip


DEFAULT_GROUP = (distributed_c10d, "_rank_not_in_group")
"""The function that each collective, and each question about ranks, calls before it uses a group."""


def flatten_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a nested state by their paths, as `torch.distributed.checkpoint` names them."""
    from torch.distributed.checkpoint import _nested_dict

    return _nested_dict.flatten_state_dict(state)[0]


class _Hidden:
    world: ProcessGroup | None = None


def world_group() -> ProcessGroup | None:
    """Return the default process group, hidden or not; None if there is none."""
    return _Hidden.world or dist.GroupMember.WORLD


@contextmanager
def hide_world() -> Iterator[None]:
    """Let `torch.distributed` not be initialized inside, for all threads; `world_group` is as before."""
    _Hidden.world = world_group()
    _world.default_pg = None
    try:
        yield
    finally:
        _world.default_pg, _Hidden.world = _Hidden.world, None


def has_lone_group() -> bool:
    """Return whether a process group of one rank has been made while the ranks' own is hidden."""
    return _Hidden.world is not None and dist.GroupMember.WORLD is not None


def end_lone_group() -> None:
    """Let `torch.distributed` not be initialized again, if it is by a group of one rank."""
    if has_lone_group():
        _world.default_pg = None


def broadcast_coalesced(group: ProcessGroup, tensors: Sequence[Tensor], bucket_bytes: int) -> None:
    """Overwrite tensors by the tensors of the group's first rank, in broadcasts of about `bucket_bytes`."""
    _broadcast_coalesced(group, list(tensors), bucket_bytes, 0)


def collectives_begun(group: ProcessGroup) -> int:
    """Return how many collectives this rank has started in a group; 0 if the backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def new_named_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, description: str
) -> ProcessGroup:
    """Return a new process group of `ranks` (global, in this order); only these ranks call, with one name.

    `dist.new_group` derives the name from the number of groups in this process. A group that a user creates
    on some ranks makes this number differ, and ranks would then wait for each other under different names.
    """
    world = world_group()
    assert isinstance(world, ProcessGroup)
    place = ranks.index(world.rank())
    with _shown(world), _not_split_from(world, len(ranks) < world.size()):
        group, _ = _new_process_group_helper(
            len(ranks),
            place,
            list(ranks),
            dist.Backend(backend),
            world.get_group_store(),
            name,  # type: ignore[arg-type]
            timeout=timeout,
            group_desc=description,
        )
    assert isinstance(group, ProcessGroup)
    _world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}  # as `new_group` does afterwards
    return group


@contextmanager
def _shown(world: ProcessGroup) -> Iterator[None]:
    shown, _world.default_pg = _world.default_pg, world
    try:
        yield
    finally:
        _world.default_pg = shown


@contextmanager
def _not_split_from(world: ProcessGroup, some: bool) -> Iterator[None]:
    """Unbind `world` from its device inside the block if the new group has only some of the ranks.

    With a bound device NCCL splits new groups from `world`, which takes a call on all ranks.
    """
    device = world.bound_device_id
    if not some or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def register_group(name: str, group: ProcessGroup) -> None:
    """Make `group` known to functional collectives under a name, until torch's own groups are destroyed."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def start_gathers(full: Tensor, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: str) -> None:
    """Start all-gathers of several tensors into slices of `full`; complete after `wait_tensor(full)`.

    The functional op for several tensors would allocate separate memory for each.
    """
    found = _resolve_process_group(group)  # type: ignore[arg-type]
    # torch's name before 2.13 is the second
    names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    start = next(getattr(found, name) for name in names if hasattr(found, name))
    _register_work(full, start(list(outputs), list(inputs)))


def start_zero_copy(inputs: Sequence[Tensor], group: str) -> Tensor:
    """Start a zero-copy all-gather: return a tensor that shows all ranks' shards after `wait_tensor`."""
    full, work = _resolve_process_group(group).publish_shards(list(inputs))  # type: ignore[arg-type, attr-defined]
    _register_work(full, work)
    return full  # type: ignore[no-any-return]


def room_to_send(group: str, like: Tensor, count: int) -> Tensor:
    """Return memory for `count` elements that are sent next: the group's own send buffer if there is one."""
    room = getattr(_resolve_process_group(group), "room_to_send", None)  # type: ignore[arg-type]
    return like.new_empty(count) if room is None else room(like, count)


def start_scatter(packed: Tensor, group: str) -> Tensor:
    """Start a reduce-scatter of a flat value; return this rank's shard, complete after `wait_tensor`.

    gloo implements a reduce-scatter as an all-reduce that drops all other shards, and so sends twice the
    bytes. With gloo, each rank instead receives the terms of this rank's shard by an all-to-all, and adds the
    terms in rank order during the wait.
    """
    found = _resolve_process_group(group)  # type: ignore[arg-type]
    world = found.size()
    if not _is_gloo(found, packed):
        return torch.ops._c10d_functional.reduce_scatter_tensor(packed, "sum", world, group)  # type: ignore[no-any-return]
    own = packed.new_empty(packed.numel() // world)
    _register_work(own, _AddedTerms(found, packed, own))
    return own


class _AddedTerms(Work):
    """Reduce-scatter by an all-to-all of terms, which `wait` adds up."""

    def __init__(self, group: ProcessGroup, packed: Tensor, own: Tensor) -> None:
        super().__init__()
        self._ranks, self._own, self._terms = group.size(), own, torch.empty_like(packed)
        # as bytes, because gloo does not support complex numbers
        self._came = group.alltoall_base(self._terms.view(torch.uint8), packed.view(torch.uint8), [], [])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._came.wait()
        # rounded once: the kernel accumulates float16 in float32
        torch.sum(self._terms.view(self._ranks, self._own.numel()), 0, out=self._own)
        return True


def _is_gloo(group: ProcessGroup, tensor: Tensor) -> bool:
    try:
        backend = group._get_backend(tensor.device)
    except RuntimeError:  # the group has no torch backend
        return False
    return backend.name() == "gloo"


def start_sum(values: Sequence[Tensor], group: str) -> Tensor:
    """Start an all-reduce of the concatenated values; return the buffer, complete after `wait_tensor`.

    A group with a method `start_sum` packs flat values itself, into the memory of the reduction.
    """
    start = getattr(_resolve_process_group(group), "start_sum", None)  # type: ignore[arg-type]
    if start is None or any(value.dim() != 1 or value.dtype != values[0].dtype for value in values):
        return torch.ops._c10d_functional.all_reduce_(torch.cat(list(values)), "sum", group)  # type: ignore[no-any-return]
    full, work = start(values)
    _register_work(full, work)
    return full  # type: ignore[no-any-return]


def start_sums(values: Sequence[Tensor], group: str) -> Tensor:
    """Start an in-place all-reduce of several values; return an empty tensor for `wait_tensor`."""
    begun = values[0].new_empty(0)
    _register_work(begun, _resolve_process_group(group).start_sums(values))  # type: ignore[arg-type, attr-defined]
    return begun
