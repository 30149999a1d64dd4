"""Open files: how many links take, and the refusal where a process may not have so many.

per rank of the mesh    1  control, of 17 neighbours at most in a tree     (2 for a pipeline axis' groups)
per rank of the row     1  messages, of 17 at most in a tree
                        1  for each of gloo's two groups, which it joins all to all; NCCL has rings
                        3  for its memory in three buffers
of several hosts, instead of these two: 1 for each rank of the same host, 1 for gloo to each other host,
                        3  for the memory of each rank of the same host in three buffers
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from fxdp.errors import MeshError
from fxdp.ir.transports import NEIGHBOURS, rotating_buffers
from fxdp.settings import Settings

_PER_GROUP = 4  # what gloo opens for itself: a listener, an epoll, an event or two
_SPARE = 32  # for kernels to be compiled, files of data, callers that have not said who they are
_DESCRIPTORS = "/proc/self/fd"


def needed(size: int, row: int, *, gloo: bool, memory: bool, tree_above: int = Settings.tree_above) -> int:
    """Files to be opened for a mesh of `size` ranks of which `row` share this rank's stages."""
    sockets = sum(n - 1 if n <= tree_above else min(n - 1, NEIGHBOURS) for n in (size, row)) + 4
    groups = 0
    if gloo:
        groups = 2 * (row - 1 + _PER_GROUP) + (2 * (size - 1 + _PER_GROUP) if row < size else 0)
    buffers = rotating_buffers(direct=False) * (row + 1) if memory else 0
    return sockets + groups + buffers


def of_hosts(mates: int, hosts: int) -> int:
    """Files to be opened for sums between `hosts` hosts, on one of which `mates` ranks of the row are."""
    return mates - 1 + hosts - 1 + _PER_GROUP + 3 * (mates + 1)


def check_limit(size: int, wanted: int) -> None:
    """Refuse before anything is opened what would end half-way.

    Raises
    ------
    MeshError : this process may not open `wanted` more files.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):
        there = len(os.listdir(_DESCRIPTORS))
        if limit != resource.RLIM_INFINITY and there + wanted + _SPARE > limit:
            has = f"has {there} open and needs {wanted} more"
            raise MeshError(_too_few(size, has, limit, there + wanted))


def as_limit(error: OSError, size: int) -> MeshError | None:
    """The same refusal for an error of the system that says so, None for others."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MeshError(_too_few(size, f"could not open one more ({error.strerror})", limit, limit))


def _too_few(size: int, has: str, limit: int, at_least: int) -> str:
    enough = 1 << (at_least + _SPARE).bit_length()
    return (
        f"joining {size} ranks takes many open files: this process {has}, and may have {limit}; raise the "
        f"limit where the ranks are started: `ulimit -n {enough}`, or LimitNOFILE= of the service"
    )
