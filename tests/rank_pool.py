"""Real rank processes for tests, started once per session and shared.

    def _sum_of_ranks(scale):                      # at the top level of a test module; runs on every rank
        value = torch.tensor(scale * dist.get_rank())
        dist.all_reduce(value)
        return int(value)

    def test_sum(ranks: RankPool) -> None:
        assert ranks.run(4, _sum_of_ranks, 10) == [60, 60, 60, 60]

`run` uses ranks that stay (each task in a fresh gloo process group); `spawn` makes ranks that end, for tests
in which they raise, exit or are killed; `prepare` does once for all ranks what each would do by itself.
Functions are found by file and name; values are pickled. Warnings are errors on ranks. No process outlives
the pool, whatever happens to a task.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.limits import HANG_S
from tests.rank_host import Reply, Task

_ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = HANG_S / 10  # for the other ranks, after one has raised
_HOST = (
    "from tests.garbage import collect_seldom; collect_seldom(); "  # before what takes seconds to import
    "from tests import reached; reached.go_on(); "
    "from tests import rank_host; rank_host.serve({})"
)
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message has its traceback and last output."""


@dataclass(frozen=True)
class Outcome:
    """How a spawned rank ended: exit status (negative: killed by that signal), result, output, duration."""

    status: int
    result: Any
    output: str
    seconds: float


@dataclass
class _Rank:
    pid: int
    connection: Connection
    output: Path

    def tail(self) -> str:
        text = self.output.read_text(errors="replace").strip() if self.output.exists() else ""
        return f"\nits last output:\n{text[-2000:]}" if text else ""


class RankPool:
    """Runs test functions on rank processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fxdp-ranks-")
        self._host: subprocess.Popen[bytes] | None = None
        self._orders: Connection | None = None
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._count = 0
        self._prepared: set[tuple[str, str, bytes]] = set()

    def prepare(self, function: Callable[..., Any], *arguments: Any) -> None:
        """`function(*arguments)`, once for all ranks that start from now on; those that run are ended.

        It runs where ranks are forked from, without a process group: what it leaves in variables of modules
        they all have. Done before, it is not done again.

        Raises:
            RankError: it raised, or left threads.
        """
        asked = (function.__module__, function.__qualname__, pickle.dumps(arguments))
        if asked in self._prepared:
            return
        self._kill_ranks()
        reply = self._order("prepare", self._task(function, (arguments, {}), timeout=0.0, init=False))
        if reply.error:
            self._end_host()  # nobody knows what it has left
            raise RankError(f"where ranks are forked from:\n{reply.error}")
        self._prepared.add(asked)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = HANG_S,
        **options: Any,
    ) -> list[Any]:
        """`function(*arguments, **options)` on each of `world_size` ranks in one gloo process group.

        Returns the results in rank order.

        Raises:
            RankError: a rank raised or did not answer in time.
        """
        while len(self._ranks) < world_size:
            self._ranks.append(self._start({}, once=False))
        ranks = self._ranks[:world_size]
        self._count += 1
        try:
            self._give(ranks, function, (arguments, options), timeout, init=True)
            replies = _collect(ranks, timeout)
        except BaseException:
            self._kill_ranks()
            raise
        if not _all_ready(ranks, replies):
            self._kill_ranks()
        errors = [
            _explain(i, ranks[i], reply) for i, reply in enumerate(replies) if reply is None or reply.error
        ]
        if errors:
            raise RankError(f"{len(errors)} of {world_size} ranks failed\n" + "\n".join(errors))
        return [pickle.loads(reply.result) for reply in replies if reply]

    def spawn(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = HANG_S,
        init: bool = True,
        environment: Mapping[str, str] | None = None,
        launched: bool = False,
        **options: Any,
    ) -> list[Outcome]:
        """As `run`, on fresh ranks that end after it as a program does; nothing that happens to them raises.

        Args:
            world_size: the number of ranks.
            function: see `run`; `arguments` and `options` are passed to it.
            timeout: seconds after which ranks are killed (their status is then -9).
            init: whether to make a process group before.
            environment: variables to set on the ranks.
            launched: set torchrun's variables, as if torchrun had started the ranks.
        """
        port = free_port() if launched else 0
        ranks = []
        for rank in range(world_size):
            variables = dict(environment or {})
            if launched:
                variables |= _torchrun(rank, world_size, port)
            ranks.append(self._start(variables, once=True))
        self._count += 1
        begin = time.monotonic()
        self._give(ranks, function, (arguments, options), timeout, init)
        try:
            return self._outcomes(ranks, begin, begin + timeout)
        finally:
            for rank in ranks:
                rank.connection.close()

    @property
    def folder(self) -> Path:
        """Ends with the pool."""
        return Path(self._folder.name)

    def close(self) -> None:
        """End all processes."""
        self._kill_ranks()
        self._end_host()
        self._folder.cleanup()

    def _end_host(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._host is not None:
            try:
                self._host.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._host.kill()
                self._host.wait()
        self._host = self._orders = self._store = None
        self._prepared.clear()

    # -- processes -----------------------------------------------------------------------------------------

    def _start(self, environment: Mapping[str, str], once: bool) -> _Rank:
        self._count += 1
        output = Path(self._folder.name) / f"output-{self._count}"
        address = str(Path(self._folder.name) / f"socket-{self._count}")
        key = secrets.token_bytes(16)
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            self._order("fork", (address, key, str(output), dict(environment), once))
            connection = listener.accept()
        return _Rank(connection.recv(), connection, output)

    def _order(self, order: str, value: Any) -> Any:
        if self._orders is None:
            self._start_host()
        assert self._orders is not None
        self._orders.send((order, value))
        return self._orders.recv()

    def _start_host(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._host = subprocess.Popen(
            [sys.executable, "-c", _HOST.format(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={"FXDP_TIMEOUT_S": f"{HANG_S:g}", **os.environ, **THREADS, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._orders = Connection(ours.detach())

    def renew(self) -> None:
        """End the ranks; the next run starts fresh ones. For after tests that break process groups."""
        self._kill_ranks()

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            self._kill(rank)
            rank.connection.close()
        self._ranks = []

    def _kill(self, rank: _Rank) -> int:
        """Kill `rank` if it still runs; its exit status."""
        status = self._order("wait", rank.pid)
        if status is None:
            self._order("kill", rank.pid)
        while status is None:
            time.sleep(0.005)
            status = self._order("wait", rank.pid)
        return int(status)

    def _outcomes(self, ranks: list[_Rank], begin: float, deadline: float) -> list[Outcome]:
        results: list[Any] = [None] * len(ranks)
        ended: dict[int, Outcome] = {}
        while len(ended) < len(ranks):
            for i, rank in enumerate(ranks):
                with contextlib.suppress(EOFError, OSError):
                    if i not in ended and rank.connection.poll():
                        results[i] = pickle.loads(rank.connection.recv().result)
                late = time.monotonic() > deadline
                status = None if i in ended else self._kill(rank) if late else self._order("wait", rank.pid)
                if status is not None:
                    text = rank.output.read_text(errors="replace") if rank.output.exists() else ""
                    ended[i] = Outcome(status, results[i], text, time.monotonic() - begin)
            time.sleep(0.01)
        return [ended[i] for i in range(len(ranks))]

    def _give(
        self,
        ranks: list[_Rank],
        function: Callable[..., Any],
        call: tuple[Any, Any],
        timeout: float,
        init: bool,
    ) -> None:
        task = self._task(function, call, timeout, init)
        for i, rank in enumerate(ranks):
            rank.connection.send(replace(task, rank=i, world_size=len(ranks)))

    def _task(self, function: Callable[..., Any], call: tuple[Any, Any], timeout: float, init: bool) -> Task:
        """What is to be done, by rank 0 of one."""
        return Task(
            module=function.__module__,
            file=function.__code__.co_filename,
            function=function.__qualname__,
            arguments=pickle.dumps(call),
            rank=0,
            world_size=1,
            store_port=0 if self._store is None else self._store.port,
            store_prefix=f"task-{self._count}",
            init=init,
            timeout_s=timeout,
            folder=str(Path(self._folder.name) / "joints"),
        )


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _collect(ranks: list[_Rank], timeout: float) -> list[Reply | None]:
    """Each rank's reply, None for ranks that died or are late; after an error the others get less time."""
    replies: dict[int, Reply | None] = {}
    deadline = time.monotonic() + timeout
    while len(replies) < len(ranks):
        waiting = [rank.connection for i, rank in enumerate(ranks) if i not in replies]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for i, rank in enumerate(ranks):
            if rank.connection in ready:
                replies[i] = _receive(rank.connection)
        if any(reply is None or reply.error for reply in replies.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return [replies.get(i) for i in range(len(ranks))]


def _receive(connection: Connection) -> Reply | None:
    try:
        reply = connection.recv()
    except (EOFError, OSError):
        return None
    assert isinstance(reply, Reply)
    return reply


def _all_ready(ranks: list[_Rank], replies: list[Reply | None]) -> bool:
    """Whether all ranks have cleaned up after their task."""
    if any(reply is None for reply in replies):
        return False
    try:
        return all(rank.connection.poll(_GRACE_S) and rank.connection.recv() == "ready" for rank in ranks)
    except (EOFError, OSError):
        return False


def _explain(index: int, rank: _Rank, reply: Reply | None) -> str:
    if reply is None:
        return f"rank {index}: no answer (it hung or died){rank.tail()}"
    return f"rank {index} raised:\n{reply.error}{rank.tail()}"
