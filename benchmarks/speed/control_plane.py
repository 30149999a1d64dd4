"""The control plane by the number of ranks: set-up, the exchange before each call, and a small sum.

    python -m benchmarks.speed.control_plane          # 2 to 256 ranks and the closed form, four minutes
    python -m benchmarks.speed.control_plane --ranks  # the closed form alone
    python -m benchmarks.speed.control_plane --rounds 4000 --beside /elsewhere/fxdp

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
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.speed.control_node import closed_form

CONSOLE = Console(width=max(Console().width, 160))
_WORKER = Path(__file__).with_name("control_rank.py")
_CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> int:
    asked = _arguments()
    if asked.beside:
        _beside(asked)
        return 0
    table = Table("ranks", "joined as", "processes", "connections", "set-up s", "exchange ms", "uneven ms",
                  "sum ms", "CPU ms/rank: exchange", "busiest", "uneven", "sum", "bytes/rank and exchange",
                  title="measured, TCP on loopback")  # fmt: skip
    with closing(_Ranks(_CHECKOUT)) as ranks:
        for size in asked.ranks:
            row = _row(size, asked, ranks)
            CONSOLE.print(" | ".join(row), highlight=False)  # what is there is not lost with the rest
            table.add_row(*row)
    CONSOLE.print(table)
    return closed_form(CONSOLE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8, 9, 16, 32, 64, 128, 256])
    parser.add_argument("--processes", type=int, default=32, help="beyond, ranks share processes as threads")
    parser.add_argument("--tree-above", type=int, default=8, help="more ranks are joined as a tree")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=7, help="of each checkout, with --beside")
    parser.add_argument("--beside", type=Path, help="another checkout, for two ranks")
    return parser.parse_args()


def _row(size: int, asked: argparse.Namespace, ranks: _Ranks) -> list[str]:
    processes = min(size, asked.processes)
    found = ranks.measured(size, processes, asked.rounds, asked.tree_above)
    kind = "all to all" if size <= asked.tree_above else "tree"
    each = [max(one[key] for one in found) for key in ("set-up", "even", "uneven", "sum")]
    cpu = [sum(one[f"{key} CPU"] for one in found) / size for key in ("even", "uneven", "sum")]
    cpu.insert(1, max(one["even CPU"] for one in found))  # of a tree the root's
    connections = max(one["connections"] for one in found)
    sent = sum(one["bytes"] for one in found) / size
    return [
        f"{size}", kind, f"{processes}", f"{connections}", f"{each[0]:.2f}",
        *(f"{seconds * 1000:.2f}" for seconds in each[1:]), *(f"{seconds * 1000:.3f}" for seconds in cpu),
        f"{sent:.0f}",
    ]  # fmt: skip


class _Ranks:
    """The process of one checkout that has imported torch, and from which ranks are forked."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def measured(self, size: int, processes: int, rounds: int, tree_above: int) -> list[dict[str, float]]:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = [list(range(number, size, processes)) for number in range(processes)]
        order = {"processes": shared, "size": size, "rounds": rounds, "port": store.port}
        order["above"] = tree_above
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.communicate()


# -- two ranks beside another checkout ---------------------------------------------------------------------


def _beside(asked: argparse.Namespace) -> None:
    here = _Ranks(_CHECKOUT), _Ranks(asked.beside)
    found: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    for iteration in range(asked.turns):
        order = list(zip(found, here, strict=True))
        for name, ranks in order if iteration % 2 else order[::-1]:
            one = ranks.measured(2, 2, asked.rounds, asked.tree_above)
            found[name].append({key: max(rank[key] for rank in one) for key in one[0]})
    table = Table("us per round, least (median)", "this", str(asked.beside), "this / other, of the least")
    for key in ("even", "even CPU", "uneven", "sum", "sum CPU"):
        these, others = ([one[key] * 1e6 for one in found[name]] for name in ("this", "other"))
        shown = [f"{min(each):.1f} ({median(each):.1f})" for each in (these, others)]
        table.add_row(key, *shown, f"{min(these) / min(others):.3f}")
    for ranks in here:
        ranks.close()
    CONSOLE.print(table)


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.exit(main())
