"""Some ranks of a measured control plane, in one process: set-up, exchanges, small sums; the times as JSON.

It imports nothing of the benchmarks, so that it runs beside another checkout of fxdp, too.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

INTEGERS = 8  # of a call: size of the batch, hashes of kinds, numbers and order


def _work(task: dict[str, Any]) -> None:
    import torch.distributed as dist

    ranks, size = task["ranks"], task["size"]
    barrier = threading.Barrier(len(ranks))

    def run(rank: int) -> dict[str, float]:
        store = dist.TCPStore("127.0.0.1", task["port"], is_master=False, wait_for_workers=False)
        return _rank(rank, size, task["rounds"], dist.PrefixStore("bench", store), barrier)

    with ThreadPoolExecutor(len(ranks)) as pool:
        print(json.dumps(list(pool.map(run, ranks))))


def _rank(rank: int, size: int, rounds: int, store: Any, barrier: threading.Barrier) -> dict[str, float]:
    import torch

    from fxdp.ranks.links.group import MessageGroup

    store.add("ready", 1)
    while store.add("ready", 0) < size:
        time.sleep(0.05)
    begin = time.perf_counter()
    control, messages = _joined(rank, size, store)
    found = {"set-up": time.perf_counter() - begin, "connections": 2 * len(control.peers)}
    agreement = agreement_on(control, size)
    agreement(0)
    sent = _out_of(control)
    for key, uneven in (("even", 0), ("uneven", 1)):
        found |= _timed(key, rounds, barrier, lambda uneven=uneven: agreement(rank * uneven % 7))
    found["bytes"] = _out_of(control, sent) / (2 * rounds)
    group = MessageGroup(messages, size, RuntimeError)  # type: ignore[arg-type]
    value = torch.ones(4)
    found |= _timed("sum", rounds, barrier, lambda: group.allreduce([value]).wait())
    agreement(0)
    return found


def _timed(key: str, rounds: int, barrier: threading.Barrier, action: Any) -> dict[str, float]:
    """Seconds of wall clock per round, and of this thread's processor."""
    barrier.wait()
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(rounds):
        action()
    return {
        key: (time.perf_counter() - wall) / rounds,
        f"{key} CPU": (time.thread_time() - cpu) / rounds,
    }


def _joined(rank: int, size: int, store: Any) -> tuple[Any, Any]:
    from fxdp.ranks.links.control import Control
    from fxdp.ranks.links.messages import Messages
    from fxdp.ranks.links.rendezvous import connect_all

    planes = range(size), range(size)
    if size <= 16:
        to_all, to_row = connect_all(store, "fxdp/bench/1", rank, planes, "127.0.0.1", 300.0)
        return Control(rank, to_all, 300.0), Messages(rank, to_row, 300.0)
    from fxdp.ranks.tree.tree_control import TreeControl
    from fxdp.ranks.tree.tree_joining import connect_tree
    from fxdp.ranks.tree.tree_messages import TreeMessages

    joint = connect_tree(store, "fxdp/bench/1", rank, planes, "127.0.0.1", 300.0, lambda: None, 25.0, 16)
    to_all, to_row = joint.connections
    assert joint.places[1] is not None
    control = TreeControl(rank, joint.places[0], to_all, 300.0)
    return control, TreeMessages(rank, joint.places[1], to_row, 300.0)


def agreement_on(control: Any, size: int) -> Any:
    """What a call exchanges, as `module/call_exchange.py` asks for it; an older checkout knows rows alone."""
    from types import SimpleNamespace

    from fxdp.ranks.agreement import Agreement

    links, mesh = SimpleNamespace(control=control), SimpleNamespace(rank=control.rank, world=size)
    agreement = Agreement(SimpleNamespace(links=links, mesh=mesh))  # type: ignore[arg-type]

    def columns(batch: int) -> Any:
        own = (batch, *range(1 << 40, (1 << 40) + INTEGERS - 1))
        if hasattr(agreement, "columns"):
            found = agreement.columns(own)
            assert all(found.same(i) for i in range(1, INTEGERS))
            return found[0]
        rows = agreement.exchange(own)
        assert len({row[6] for row in rows}) == len({(row[1], row[5]) for row in rows}) == 1
        columns = tuple(zip(*rows, strict=True))
        assert len(set(columns[2])) == len(set(columns[3])) == 1
        assert any(columns[4])
        return [row[0] for row in rows]

    return columns


def _out_of(control: Any, before: int = 0) -> int:
    """Bytes that the kernel has sent for this rank's control channel."""
    found = 0
    for peer in control.peers:
        info = peer.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        found += struct.unpack_from("<Q", info, 200)[0]  # tcpi_bytes_sent, since Linux 4.19
    return found - before


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _work(json.loads(sys.argv[1]))
