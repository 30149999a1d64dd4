"""File descriptors: the number that a mesh needs, and the refusal if the process may not open that many.

per rank of the mesh    1  control, of 17 neighbors at most in a tree      (2 for a pipeline axis' groups)
per rank of the row     1  messages, of 17 at most in a tree
                        1  for each of gloo's two groups, connected all to all; NCCL has rings
                        3  for the memory of this rank in three buffers
on several hosts, instead of these two: 1 for each rank of the same host, 1 for gloo to each other host,
                        3  for the memory of each rank of the same host in three buffers
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from fxdp.errors import MeshError
from fxdp.ir.network.transports import NEIGHBOURS, rotating_buffers
from fxdp.settings import Settings

_PER_GROUP = 4  # opened by gloo itself: a listener, an epoll, an event or two
_SPARE = 32  # for kernel compilation, data files, callers without a complete handshake
_DESCRIPTORS = "/proc/self/fd"


def needed(size: int, row: int, *, gloo: bool, memory: bool, tree_above: int = Settings.tree_above) -> int:
    """Return the number of files to open for a mesh of `size` ranks, `row` of which share the same stages."""
    sockets = sum(n - 1 if n <= tree_above else min(n - 1, NEIGHBOURS) for n in (size, row)) + 4
    groups = 0
    if gloo:
        groups = 2 * (row - 1 + _PER_GROUP) + (2 * (size - 1 + _PER_GROUP) if row < size else 0)
    buffers = rotating_buffers(direct=False) * (row + 1) if memory else 0
    return sockets + groups + buffers


def of_hosts(mates: int, hosts: int) -> int:
    """Return the number of files to open for sums between `hosts` hosts, with `mates` ranks on this host."""
    return mates - 1 + hosts - 1 + _PER_GROUP + 3 * (mates + 1)


def check_limit(size: int, wanted: int) -> None:
    """Raise before anything is opened if the process would run out of file descriptors half-way.

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
    """Return a `MeshError` if an OS error is due to too many open files, None for a different error."""
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
