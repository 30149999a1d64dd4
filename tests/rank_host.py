"""The processes behind tests/rank_pool.py: a host that has imported torch and forks one process per rank.

    pytest  --(orders: fork, wait, kill, prepare)-->  host  --fork-->  rank 0, rank 1, ...
    pytest  <------------- one connection per rank (tasks, results) ------------

Importing torch takes seconds, a fork milliseconds. The host itself never opens a process group or runs
anything in parallel, so it has no threads that a fork could break. What tests have it prepare (models that
are captured once for all ranks), its ranks know from their first moment. Ranks die with their host, the host
with pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.hub

import fxdp
import fxdp.module.compiled  # imported once, for all ranks
import fxdp.ranks.agreement  # the same
from fxdp.disk.entries import key_of
from fxdp.torch_compat import begin_autograd
from tests.captures import traced_once
from tests.quick_kernels import know_inductor


@dataclass(frozen=True)
class Task:
    """A function of a test module, to be run by one rank."""

    module: str
    file: str
    function: str
    arguments: bytes
    rank: int
    world_size: int
    store_port: int
    store_prefix: str
    init: bool
    timeout_s: float
    folder: str
    """Where processes keep what one of them finds out for all."""


_BACKWARD_HAS_THREADS = torch.cuda.device_count() > 0
"""Where there are GPUs: no fork may follow one."""
_LEFT: list[Task] = []
"""What each rank prepares by itself then."""


@dataclass(frozen=True)
class Reply:
    """What a rank answers: its result, or the text of its error."""

    result: bytes = b""
    error: str = ""


def serve(descriptor: int) -> None:
    """Carry out the orders that come over `descriptor`, until pytest closes the connection."""
    orders = Connection(descriptor)
    torch._dynamo.config.fake_tensor_cache_enabled = False  # as in tests/conftest.py
    torch.hub.tqdm.monitor_interval = 0  # torch makes a bar, shown or not, for each graph it runs: no thread
    if "PYTEST_XDIST_WORKER" in os.environ:  # an entire run: ranks of many tests need it
        begin_autograd()  # before Inductor's fake tensors
        know_inductor()
        if not _BACKWARD_HAS_THREADS:
            know_capture()
    gc.freeze()  # what is imported is no garbage: ranks collect theirs after each task
    children: set[int] = set()
    while True:
        try:
            order, value = orders.recv()
        except EOFError:
            break
        if order == "fork":
            pid = os.fork()
            if pid == 0:
                orders.close()
                _be_rank(*value)
            children.add(pid)
            orders.send(pid)
        if order == "prepare":
            orders.send(_prepared(value))
        if order == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(value, signal.SIGKILL)
            orders.send(None)
        if order == "wait":
            ended, status = os.waitpid(value, os.WNOHANG)
            children.discard(ended)
            orders.send(os.waitstatus_to_exitcode(status) if ended else None)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def know_capture() -> None:
    """What the first capture of a process imports and builds, a second of each rank that starts."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fxdp.plan(model, (torch.ones(4, 2),), mesh={"dp": 2})
    key_of()  # reads all of fxdp's source


def _prepared(task: Task) -> Reply:
    """Run `task` here, for all ranks that are forked from now on; by each where no fork may follow."""
    if _BACKWARD_HAS_THREADS:
        _LEFT.append(task)
        return Reply()
    try:
        with traced_once(Path(task.folder)):
            reply = Reply(_call(task))
    except BaseException:
        reply = Reply(error=traceback.format_exc())
    torch.set_default_dtype(torch.float32)
    if not reply.error and len(os.listdir("/proc/self/task")) > 1:
        reply = Reply(error="the task has left threads: a fork would have their locks, but not them")
    gc.collect()
    gc.freeze()
    return reply


def _be_rank(address: str, key: bytes, output: str, environment: dict[str, str], once: bool) -> None:
    """The life of one rank; never returns."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch._dynamo.config.fake_tensor_cache_enabled = once  # as a program does; else as in tests/conftest.py
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    connection = Client(address, "AF_UNIX", authkey=key)
    connection.send(os.getpid())
    code = 0
    try:
        for task in _LEFT:
            with traced_once(Path(task.folder)):
                _call(task)
        while True:
            task = connection.recv()
            if once:
                code = _run_once(task, connection)
                break
            _run(task, connection)
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_once(task: Task, connection: Connection) -> int:
    """Run `task` as a program does: an error goes to sys.excepthook, then come the exit functions."""
    code = 0
    try:
        with traced_once(Path(task.folder)):
            connection.send(Reply(_call(task)))
    except BaseException:
        code = 1
        sys.last_value = sys.exc_info()[1]
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    return code


def _run(task: Task, connection: Connection) -> None:
    """Run `task`, answer, clean up, and say that this rank is ready for the next."""
    try:
        with traced_once(Path(task.folder)):
            reply = Reply(_call(task))
    except BaseException:
        reply = Reply(error=traceback.format_exc())
    connection.send(reply)
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # what is left stays: modules, caches
    connection.send("ready")


def _call(task: Task) -> bytes:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    function = _find(task)
    arguments, options = pickle.loads(task.arguments)
    if task.init:
        store = dist.TCPStore("127.0.0.1", task.store_port, is_master=False)
        limit = timedelta(seconds=task.timeout_s)
        scoped = dist.PrefixStore(task.store_prefix, store)
        dist.init_process_group(
            "gloo", store=scoped, rank=task.rank, world_size=task.world_size, timeout=limit
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.dumps(function(*arguments, **options))


def _find(task: Task) -> Callable[..., Any]:
    """The task's function, from its file under the name that pytest gave its module."""
    module = sys.modules.get(task.module)
    if module is None or getattr(module, "__file__", None) != task.file:
        spec = importlib.util.spec_from_file_location(task.module, task.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[task.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in task.function.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
