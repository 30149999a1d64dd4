"""The control plane in closed form: the CPU of one node of the tree, with all that it reads there already."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.speed.control_rank import INTEGERS, agreement_on

_LIMIT = 64, 1.0  # connections, and ms of CPU per rank and call, at 8,192 ranks


def closed_form(console: Console) -> int:
    table = Table("ranks (8 per host)", "levels", "connections", "CPU ms: leaf", "inner", "root",
                  "uneven: leaf", "inner", "root", "all bytes", "uneven",
                  title="closed form, by one node's work")  # fmt: skip
    good = True
    for size in (16, 256, 1024, 2048, 4096, 8192, 16384):
        row, fits = _form(size)
        table.add_row(*row)
        good = good and (fits or size != 8192)
    console.print(table)
    limit = f"at most {_LIMIT[0]} connections and {_LIMIT[1]:g} ms CPU per rank and call"
    console.print(f"at 8,192: {limit}: {good}")
    return 0 if good else 1


def _form(size: int) -> tuple[list[str], bool]:
    from fxdp.ranks.tree.tree_shape import tree_places

    places = tree_places([f"host {rank // 8}" for rank in range(size)])
    depth, levels = [0] * size, 0
    for rank in places[0].order:
        parent = places[rank].parent
        depth[rank] = 0 if parent is None else depth[parent] + 1
        levels = max(levels, depth[rank])
    connections = 2 * max(len(place.children) + (place.parent is not None) for place in places)
    inner = max((r for r in range(1, size) if places[r].children), default=0,
                key=lambda r: (len(places[r].children), sum(places[r].counts)))  # fmt: skip
    leaf = next(rank for rank in range(size - 1, -1, -1) if not places[rank].children)
    found, total = [], []
    for uneven in (False, True):
        cpu = [_node(places[rank], rank, uneven) for rank in (leaf, inner, 0)]
        found.append([seconds for seconds, _ in cpu])
        answer = cpu[0][1]
        above = [1 + sum(place.counts) for place in places[1:]]
        # two headers; the integers, or a head for each column, and a byte per rank for the uneven one
        sizes = [9 * INTEGERS + n if uneven and n > 1 else 8 * INTEGERS for n in above]
        parts = sum(sizes) + 18 * len(sizes)
        total.append(parts + (size - 1) * answer)
    most = max(max(each) for each in found) * 1000
    times = [f"{seconds * 1000:.3f}" for each in found for seconds in each]
    row = [f"{size:,}", f"{levels + 1}", f"{connections}", *times, *(f"{n / 1e6:.2f} MB" for n in total)]
    return row, connections <= _LIMIT[0] and most <= _LIMIT[1]


def _node(place: Any, rank: int, uneven: bool) -> tuple[float, int]:
    """CPU seconds of one node and round: all that it reads is there; and the bytes of an answer."""
    from fxdp.ranks.comms.frames import FrameKind, framed
    from fxdp.ranks.tree.rank_parts import RankParts
    from fxdp.ranks.tree.tree_control import TreeControl

    pairs = {other: socket.socketpair() for other in (*place.children, place.parent) if other is not None}
    for ours, theirs in pairs.values():
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
            end.setblocking(False)
    control = TreeControl(rank, place, {other: ours for other, (ours, _) in pairs.items()}, 10.0)
    call = agreement_on(control, place.size)

    def said(count: int) -> bytes:
        rest = range(1 << 40, (1 << 40) + INTEGERS - 1)
        rows = [struct.pack(f"<{INTEGERS}q", r % 251 * uneven, *rest) for r in range(count)]
        return framed(FrameKind.DATA, RankParts.join([RankParts.of(row) for row in rows]).encode(), 0)

    frames = {other: said(n) for other, n in zip(place.children, place.counts, strict=True)}
    answer = said(place.size)
    least = float("inf")
    for _ in range(30):
        for other, frame in frames.items():
            pairs[other][1].send(frame)
        if place.parent is not None:
            pairs[place.parent][1].send(answer)
        before = time.thread_time()
        call(0)
        least = min(least, time.thread_time() - before)
        for _, theirs in pairs.values():
            _empty(theirs)
    control.close()
    for _, theirs in pairs.values():
        theirs.close()
    return least, len(answer)


def _empty(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        return
