"""The control plane by the number of ranks: set-up, the exchange before each call, and a small sum.

    python benchmarks/control_plane.py                # 2 to 256 ranks and the closed form, four minutes
    python benchmarks/control_plane.py --ranks        # the closed form alone
    python benchmarks/control_plane.py --rounds 4000 --beside /elsewhere/fxdp

Ranks are light: a process each up to `--processes`, beyond that threads, many to a process, as a process that
has imported torch takes 200 MiB. They use fxdp's own rendezvous, channels and messages over TCP on loopback.
Seconds of wall clock are those of a machine with fewer cores than ranks; connections and bytes do not depend
on it, and CPU per rank only by what changing threads costs. The closed form takes the CPU of one node of the
tree, with as many neighbours and bytes as at that size, measured here alone: all of its children's parts are
there, so it counts work and no waiting.

`--beside` measures two ranks with another checkout of fxdp, in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

CONSOLE = Console(width=max(Console().width, 100))
_INTEGERS = 8  # of a call: size of the batch, hashes of kinds, numbers and order
_LIMIT = 64, 1.0  # connections, and ms of CPU per rank and call, at 8,192 ranks


def main() -> int:
    asked = _arguments()
    if asked.worker:
        _work(json.loads(asked.worker))
        return 0
    if asked.beside:
        _beside(asked)
        return 0
    table = Table("ranks", "joined as", "processes", "connections", "set-up s", "exchange ms", "uneven ms",
                  "sum ms", "CPU ms/rank: exchange", "uneven", "sum", "bytes/rank and exchange",
                  title="measured, TCP on loopback")  # fmt: skip
    for size in asked.ranks:
        table.add_row(*_row(size, asked))
    CONSOLE.print(table)
    return _closed_form()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8, 16, 17, 32, 64, 128, 256])
    parser.add_argument("--processes", type=int, default=32, help="beyond, ranks share processes as threads")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=7, help="of each checkout, with --beside")
    parser.add_argument("--beside", type=Path, help="another checkout, for two ranks")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(size: int, asked: argparse.Namespace) -> list[str]:
    processes = min(size, asked.processes)
    found = _measured(size, processes, asked.rounds, Path(__file__).parent.parent)
    kind = "all to all" if size <= 16 else "tree"
    each = [max(one[key] for one in found) for key in ("set-up", "even", "uneven", "sum")]
    cpu = [sum(one[f"{key} CPU"] for one in found) / size for key in ("even", "uneven", "sum")]
    connections = max(one["connections"] for one in found)
    sent = sum(one["bytes"] for one in found) / size
    return [
        f"{size}", kind, f"{processes}", f"{connections}", f"{each[0]:.2f}",
        *(f"{seconds * 1000:.2f}" for seconds in each[1:]), *(f"{seconds * 1000:.3f}" for seconds in cpu),
        f"{sent:.0f}",
    ]  # fmt: skip


def _measured(size: int, processes: int, rounds: int, checkout: Path) -> list[dict[str, float]]:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = []
    for number in range(processes):
        ranks = list(range(number, size, processes))
        task = {"ranks": ranks, "size": size, "rounds": rounds, "port": store.port}
        command = [sys.executable, __file__, "--worker", json.dumps(task)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    texts = [worker.communicate()[0] for worker in workers]
    return [one for text in texts for one in json.loads(text)]


# -- a process with some of the ranks ----------------------------------------------------------------------


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
    agreement = _agreement(control, size)
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


def _agreement(control: Any, size: int) -> Any:
    """What a call exchanges, as `module/call_exchange.py` asks for it; an older checkout knows rows alone."""
    from types import SimpleNamespace

    from fxdp.ranks.agreement import Agreement

    links, mesh = SimpleNamespace(control=control), SimpleNamespace(rank=control.rank, world=size)
    agreement = Agreement(SimpleNamespace(links=links, mesh=mesh))  # type: ignore[arg-type]

    def columns(batch: int) -> Any:
        own = (batch, *range(1 << 40, (1 << 40) + _INTEGERS - 1))
        if hasattr(agreement, "columns"):
            found = agreement.columns(own)
            assert all(found.same(i) for i in range(1, _INTEGERS))
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


# -- two ranks beside another checkout ---------------------------------------------------------------------


def _beside(asked: argparse.Namespace) -> None:
    here = Path(__file__).parent.parent
    found: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    for turn in range(asked.turns):
        order = [("this", here), ("other", asked.beside)]
        for name, checkout in order if turn % 2 else order[::-1]:
            one = _measured(2, 2, asked.rounds, checkout)
            found[name].append({key: max(rank[key] for rank in one) for key in one[0]})
    table = Table("us per round, least (median)", "this", str(asked.beside), "this / other, of the least")
    for key in ("even", "even CPU", "uneven", "sum", "sum CPU"):
        these, others = ([one[key] * 1e6 for one in found[name]] for name in ("this", "other"))
        shown = [f"{min(each):.1f} ({median(each):.1f})" for each in (these, others)]
        table.add_row(key, *shown, f"{min(these) / min(others):.3f}")
    CONSOLE.print(table)


# -- the closed form ---------------------------------------------------------------------------------------


def _closed_form() -> int:
    table = Table("ranks (8 per host)", "levels", "connections", "CPU ms: leaf", "inner", "root",
                  "uneven: leaf", "inner", "root", "all bytes", "uneven",
                  title="closed form, by one node's work")  # fmt: skip
    good = True
    for size in (16, 256, 1024, 2048, 4096, 8192, 16384):
        row, fits = _form(size)
        table.add_row(*row)
        good = good and (fits or size != 8192)
    CONSOLE.print(table)
    limit = f"at most {_LIMIT[0]} connections and {_LIMIT[1]:g} ms CPU per rank and call"
    CONSOLE.print(f"at 8,192: {limit}: {good}")
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
        sizes = [9 * _INTEGERS + n if uneven and n > 1 else 8 * _INTEGERS for n in above]
        parts = sum(sizes) + 18 * len(sizes)
        total.append(parts + (size - 1) * answer)
    most = max(max(each) for each in found) * 1000
    times = [f"{seconds * 1000:.3f}" for each in found for seconds in each]
    row = [f"{size:,}", f"{levels + 1}", f"{connections}", *times, *(f"{n / 1e6:.2f} MB" for n in total)]
    return row, connections <= _LIMIT[0] and most <= _LIMIT[1]


def _node(place: Any, rank: int, uneven: bool) -> tuple[float, int]:
    """CPU seconds of one node and round: all that it reads is there; and the bytes of an answer."""
    from fxdp.ranks.links.frames import FrameKind, framed
    from fxdp.ranks.tree.rank_parts import RankParts
    from fxdp.ranks.tree.tree_control import TreeControl

    pairs = {other: socket.socketpair() for other in (*place.children, place.parent) if other is not None}
    for ours, theirs in pairs.values():
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
            end.setblocking(False)
    control = TreeControl(rank, place, {other: ours for other, (ours, _) in pairs.items()}, 10.0)
    call = _agreement(control, place.size)

    def said(count: int) -> bytes:
        rest = range(1 << 40, (1 << 40) + _INTEGERS - 1)
        rows = [struct.pack(f"<{_INTEGERS}q", r % 251 * uneven, *rest) for r in range(count)]
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


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.exit(main())
