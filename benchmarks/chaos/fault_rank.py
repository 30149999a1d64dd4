"""One rank of a run that is disturbed: it trains a little, saves, loads and evaluates; one rank has a fault.

    start-up | compile: inside of the model, as it is traced | lowering | first step | forward, backward:
    inside of a sum or of a stage | optimizer | between | saving | loading | eval | any moment: by a clock

Each rank writes what it hears, and when, beside the moment of the fault; `fault_kinds.py` reads it.

    python -m benchmarks.chaos.fault_rank FAULT FOLDER  # as torchrun starts it, the fault as JSON
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxdp
import fxdp.compiler.lowered_parts
from benchmarks.chaos.fault_case import AT_TRACE, Fault, Net
from benchmarks.chaos.fault_strikes import REFUSED, STRIKES
from fxdp.module.checkpoint import saving
from fxdp.runtime.stage_calls import Code
from fxdp.transport.group import MessageGroup
from tests.quick_kernels import know_inductor

STEP = 3  # in which most faults happen
STEPS = 5
_LAPS_S = 20.0
_LOOK_S = 0.02
_HUNG = 9  # the status of a rank that hung, once the others know


def disturbed(rank: int, fault: Fault, folder: str) -> None:
    """The life of a rank."""
    warnings.simplefilter("ignore")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    life = _Rank(fault, rank, Path(folder))
    if life.guilty and fault.kind == "error in a thread":
        thread = threading.Thread(target=life.live)
        thread.start()
        thread.join()
    else:
        life.live()


def disturbed_fork(fault: Fault, folder: str) -> None:
    """The same for a rank that was forked where all is imported, in a process group."""
    disturbed(dist.get_rank(), fault, folder)


def launch(fault: Fault, folder: str) -> None:
    """torchrun itself, and by it ranks that import all by themselves."""
    from torch.distributed import run

    ranks = ["--standalone", "--nproc-per-node", str(fault.ranks)]
    run.main([*ranks, "-m", "benchmarks.chaos.fault_rank", json.dumps(asdict(fault)), folder])


def warm() -> None:
    """Once for all ranks: what a first capture and Inductor import and build."""
    warnings.simplefilter("ignore")
    know_inductor()
    batch = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    fxdp.plan(Net(stages=False), batch, mesh={"dp": 2})
    fxdp.plan(Net(stages=False), batch, mesh={"dp": 2}, strategy="shard")
    fxdp.plan(Net(stages=True), batch, mesh={"pp": 2}, pipeline={"microbatches": 2})


class _Rank:
    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        self.fault = fault
        self.rank = rank
        self.guilty = self.rank == fault.victim
        self.folder = folder
        self.step = 0
        self.where = ""
        self.done = False

    def meta(self, what: str, text: str = "") -> None:
        with (self.folder / f"{self.rank}.notes").open("a") as file:
            file.write(json.dumps([time.time(), what, text]) + "\n")

    def live(self) -> None:
        try:
            self._train()
        except SystemExit:
            self.meta("exits")
            if self.fault.launched:
                raise  # else: Python shows no error for it, and asks no hook
        except BaseException as error:
            self.meta("news", _words(error))
            raise
        else:
            self.meta("done")

    def struck(self, phase: str) -> bool:
        """Whether it is this rank to which something happens, in this phase."""
        return self.guilty and self.fault.phase == phase and self.fault.kind in STRIKES

    def at(self, phase: str) -> None:
        """Where a fault of this phase happens."""
        if self.struck(phase):
            self.strike()

    def strike(self) -> None:
        if self.done and self.fault.phase != "compile":  # a model that fails does so in each trace
            return
        if not self.done:
            self.meta("fault")
        self.done = True
        if self.fault.kind == "hang":
            self._hang()
        STRIKES[self.fault.kind]()

    def _hang(self) -> None:
        """As long as nobody knows of it: afterwards the others only wait for the end of this process."""
        others = [self.folder / f"{rank}.notes" for rank in range(self.fault.ranks) if rank != self.rank]
        while not all(file.exists() and '"news"' in file.read_text() for file in others):
            time.sleep(_LOOK_S)
        os._exit(_HUNG)

    # -- the program ---------------------------------------------------------------------------------------

    def _train(self) -> None:
        stages = self.fault.stages
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")) if stages else None
        self.at("start-up")
        compiled = self._compiled(mesh)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=self._unless("another lr", 0.3, 0.1))
        if self.struck("any moment"):
            clock = threading.Timer(self.fault.after, self.strike)
            clock.daemon = True
            clock.start()
        with self._inside(optimizer):
            end = time.monotonic() + _LAPS_S * (self.fault.phase == "any moment")
            self._lap(compiled, optimizer)
            while time.monotonic() < end:
                self._lap(compiled, optimizer)

    def _lap(self, compiled: fxdp.CompiledModule, optimizer: torch.optim.Optimizer) -> None:
        for self.step in range(1, STEPS + 1):
            self._step(compiled, optimizer)
        path = self.folder / "checkpoint"
        fxdp.save(path, compiled, optimizer, step=self.step)
        fxdp.load(path, compiled, optimizer)
        compiled.eval()
        with torch.no_grad():
            compiled(*self._batch())
            self.at("eval")
            compiled(*self._batch())
        compiled.train()

    def _unless(self, kind: str, wrong: Any, right: Any) -> Any:
        """The value of this rank, which is wrong on the one with this fault."""
        if self.guilty and self.fault.kind == kind:
            self.meta("fault")
            return wrong
        return right

    def _compiled(self, mesh: DeviceMesh | None) -> fxdp.CompiledModule:
        torch.manual_seed(0)
        stages = self.fault.stages
        model = Net(stages, self._unless("another model", 9, 8))
        options: dict[str, Any] = {"debug": {"check_replicas": 2}}
        if stages:
            options["pipeline"] = {"microbatches": self._unless("another option", 1, 2)}
        else:
            options["communication"] = {"bucket_cap_mb": self._unless("another option", 1.0, 25.0)}
        if self.fault.mode == "shard":
            options["strategy"] = "shard"
        backend = "inductor" if self.fault.compiled else "eager"
        return fxdp.compile(model, mesh, backend=backend, **options)

    def _batch(self) -> tuple[Tensor, Tensor]:
        own = 0 if self.fault.stages else self.rank
        generator = torch.Generator().manual_seed(100 * self.step + own)
        return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)

    def _step(self, compiled: fxdp.CompiledModule, optimizer: torch.optim.Optimizer) -> None:
        disturbs = self.step == STEP and self.fault.phase == "step"
        if disturbs and self._unless("a step less", True, False):
            return
        if disturbs and self.fault.kind in REFUSED:
            self._refused(compiled)
        self.where = "forward"
        loss = compiled(*self._batch())
        self.where = ""
        if self.step == 1:
            self.at("first step")
        second = compiled(*self._batch()) if disturbs and self.fault.kind == "another order" else None
        if second is not None:
            loss, second = self._unless("another order", (second, loss), (loss, second))
            second.backward()
        self.where = "backward"
        if not (disturbs and self._unless("no backward", True, False)):
            loss.backward()
        self.where = ""
        optimizer.step()
        optimizer.zero_grad()
        if disturbs and self._unless("other weights", True, False):
            compiled.load_state_dict({n: t + 1 for n, t in compiled.state_dict().items()})
        if self.step == STEP:
            self.at("between")

    def _refused(self, compiled: fxdp.CompiledModule) -> None:
        """A call that is refused on all ranks; the next one must work."""
        x, y = self._batch()
        change = REFUSED[self.fault.kind]
        if self.guilty:
            self.meta("fault")
            call = lambda: change(compiled, x, y)  # noqa: E731
        else:
            call = lambda: compiled(x, y)  # noqa: E731
        try:
            call()
        except Exception as error:
            self.meta("refused", _words(error))
        else:
            self.meta("accepted")

    # -- faults inside of something ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _inside(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The fault inside of tracing, a sum, a stage, an optimizer's step, or a file's writing."""
        with contextlib.ExitStack() as stack:
            if self.struck("compile"):
                AT_TRACE.append(self.strike)
            if self.struck("optimizer"):
                optimizer.register_step_pre_hook(self._at_optimizer)
            for owner, name in self._places():
                run = self._struck_in(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, run))
            yield

    def _at_optimizer(self, *_: Any) -> None:
        if self.step == STEP:
            self.strike()

    def _places(self) -> list[tuple[Any, str]]:
        if not (self.guilty and self.fault.kind in STRIKES):
            return []
        stages = self.fault.stages
        found: dict[str, list[tuple[Any, str]]] = {
            "lowering": [(fxdp.compiler.lowered_parts, "lower_part")],
            "forward": [(Code, "forward")] if stages else [(MessageGroup, "allreduce")],
            "backward": [(Code, "backward_arguments")] if stages else [(MessageGroup, "allreduce")],
            "saving": [(saving, "_write")],
            "loading": [(saving, "_read")],
        }
        return found.get(self.fault.phase, [])

    def _struck_in(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed_run(*args: Any, **kwargs: Any) -> Any:
            inside = self.fault.phase in ("forward", "backward")
            here = self.fault.stages or self.where == self.fault.phase
            if not inside or (here and self.step == STEP):
                self.strike()
            return run(*args, **kwargs)

        return disturbed_run


def _words(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives torchrun
    disturbed(int(os.environ["RANK"]), Fault(**json.loads(sys.argv[1])), sys.argv[2])
