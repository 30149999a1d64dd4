"""Ranks of a measured control plane: set-up, exchanges, small sums; the times as JSON.

One process imports torch, which takes seconds, and forks for each order the processes that it asks for; so
256 ranks are there at once. It imports nothing of the benchmarks: it runs beside another checkout, too.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INTEGERS = 8  # of a call: size of the batch, hashes of kinds, numbers and order


def _serve() -> None:
    """Carry out orders, a line of JSON each, until there are none."""
    _import_all()
    for line in sys.stdin:
        order = json.loads(line)
        children = [_started(order | {"ranks": ranks}) for ranks in order["processes"]]
        texts = [text for _, output in children for text in output]
        for pid, output in children:
            output.close()
            os.waitpid(pid, 0)
        print(json.dumps([one for text in texts for one in json.loads(text)]), flush=True)


def _started(task: dict[str, Any]) -> tuple[int, Any]:
    """A process with some of the ranks, and what it prints."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs, 1)
        try:
            _work(task)
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(theirs)
    return pid, os.fdopen(ours)


def _import_all() -> None:
    """What ranks need, so that no fork has to read it."""
    import_module(f"{_rooms()[0]}.agreement")
    import_module(f"{_rooms()[1]}.group")


@functools.cache
def _rooms() -> tuple[str, str]:
    """Where agreement and links are: before there was a room for ranks they had others."""
    import fxdp

    # by its files: where fxdp is installed, too, Python would find rooms of that one
    found = Path(fxdp.__file__).with_name("ranks").is_dir()
    return ("fxdp.ranks", "fxdp.ranks.comms") if found else ("fxdp.runtime", "fxdp.comms")


def _work(task: dict[str, Any]) -> None:
    import torch.distributed as dist

    ranks, size = task["ranks"], task["size"]
    barrier = threading.Barrier(len(ranks))

    def run(rank: int) -> dict[str, float]:
        store = dist.TCPStore("127.0.0.1", task["port"], is_master=False, wait_for_workers=False)
        return _rank(rank, size, task, dist.PrefixStore("bench", store), barrier)

    with ThreadPoolExecutor(len(ranks)) as pool:
        print(json.dumps(list(pool.map(run, ranks))))


def _rank(
    rank: int, size: int, task: dict[str, Any], store: Any, barrier: threading.Barrier
) -> dict[str, float]:
    import torch

    group_of = import_module(f"{_rooms()[1]}.group").MessageGroup
    store.add("ready", 1)
    while store.add("ready", 0) < size:
        time.sleep(0.05)
    begin = time.perf_counter()
    control, messages = _process_mesh(rank, size, store, task["above"])
    rounds = task["rounds"]
    found = {"set-up": time.perf_counter() - begin, "connections": 2 * len(control.peers)}
    agreement = agreement_on(control, size)
    agreement(0)
    sent = _out_of(control)
    for key, uneven in (("even", 0), ("uneven", 1)):
        found |= _timed(key, rounds, barrier, lambda uneven=uneven: agreement(rank * uneven % 7))
    found["bytes"] = _out_of(control, sent) / (2 * rounds)
    group = group_of(messages, size, RuntimeError)
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


def _process_mesh(rank: int, size: int, store: Any, above: int) -> tuple[Any, Any]:
    names = ("rendezvous", "control", "messages")
    accepting, control, messages = (import_module(f"{_rooms()[1]}.{name}") for name in names)
    planes = range(size), range(size)
    if size <= above:
        here = "127.0.0.1", 300.0
        if _rooms()[1] == "fxdp.comms":  # one plane at a time
            found = [accepting.connect_all(store, f"bench/{i}", rank, size, *here) for i in range(2)]
        else:
            found = accepting.connect_all(store, "fxdp/bench/1", rank, planes, *here)
        return control.Control(rank, found[0], 300.0), messages.Messages(rank, found[1], 300.0)
    from fxdp.ranks.tree.tree_control import TreeControl
    from fxdp.ranks.tree.tree_joining import connect_tree
    from fxdp.ranks.tree.tree_messages import TreeMessages

    joint = connect_tree(store, "fxdp/bench/1", rank, planes, "127.0.0.1", 300.0, lambda: None, 25.0, above)
    to_all, to_row = joint.connections
    assert joint.places[1] is not None  # as large as the full value
    control = TreeControl(rank, joint.places[0], to_all, 300.0)
    return control, TreeMessages(rank, joint.places[1], to_row, 300.0)


def agreement_on(control: Any, size: int) -> Any:
    """What a call exchanges, as `call_exchange.py` asks for it; an older checkout knows rows alone."""
    comms, mesh = SimpleNamespace(control=control), SimpleNamespace(rank=control.rank, world=size)
    process_mesh = SimpleNamespace(comms=comms, mesh=mesh, rank=control.rank, world=size)
    agreement = import_module(f"{_rooms()[0]}.agreement").Agreement(process_mesh)

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
    _serve()
