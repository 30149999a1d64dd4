"""One rank of a run that is disturbed: it trains a little, saves, loads and evaluates; one rank has a fault.

    start-up | compile: inside of the model, as it is traced | first step | forward, backward: inside of a
    sum or of a stage | between | saving | loading | eval

Each rank writes what it hears, and when, beside the moment of the fault; `fault_kinds.py` reads it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from benchmarks.fault_strikes import REFUSED, STRIKES
from fxdp.module.checkpoint import saving
from fxdp.ranks.links.group import MessageGroup
from fxdp.runtime.stage_calls import Backward, Forward, InputGradient, WeightGradient
from tests.rank_host import _know_inductor

STEP = 3  # in which most faults happen
STEPS = 5
_at_trace: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and where.

    Attributes
    ----------
    mode : dp, dp3 (three ranks), pp, or inductor (two ranks).
    """

    kind: str
    phase: str
    mode: str
    victim: int

    @property
    def ranks(self) -> int:
        return 3 if self.mode == "dp3" else 2


class Net(nn.Module):
    def __init__(self, stages: bool, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        self.norm = nn.LayerNorm(width) if stages else nn.BatchNorm1d(width)  # a sum in each forward
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for strike in _at_trace:
            strike()
        if not self.stages:
            assert torch.isfinite(x).all(), "a bad sample"
        return F.cross_entropy(self.last(F.relu(self.norm(self.first(x)))), y)


def disturbed(fault: Fault, folder: str) -> None:
    """The life of a rank."""
    warnings.simplefilter("ignore")
    rank = _Rank(fault, Path(folder))
    if rank.guilty and fault.kind == "error in a thread":
        thread = threading.Thread(target=rank.live)
        thread.start()
        thread.join()
    else:
        rank.live()


def warm() -> None:
    """Once for all ranks: what a first capture and Inductor import and build."""
    warnings.simplefilter("ignore")
    _know_inductor()
    batch = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    fxdp.plan(Net(stages=False), batch, mesh={"dp": 2})
    fxdp.plan(Net(stages=True), batch, mesh={"pp": 2}, microbatches=2)


class _Rank:
    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault = fault
        self.rank = dist.get_rank()
        self.guilty = self.rank == fault.victim
        self.folder = folder
        self.step = 0
        self.where = ""
        self.done = False

    def note(self, what: str, text: str = "") -> None:
        with (self.folder / f"{self.rank}.notes").open("a") as file:
            file.write(json.dumps([time.time(), what, text]) + "\n")

    def live(self) -> None:
        try:
            self._train()
        except SystemExit:
            self.note("exits")  # Python shows no error for it, and asks no hook
        except BaseException as error:
            self.note("news", _words(error))
            raise
        else:
            self.note("done")

    def at(self, phase: str) -> None:
        """Where a fault of this phase happens."""
        if self.guilty and self.fault.phase == phase and self.fault.kind in STRIKES:
            self.strike()

    def _strike_with(self, *_: object) -> None:
        self.strike()

    def strike(self) -> None:
        self.note("fault")
        STRIKES[self.fault.kind]()

    # -- the program ---------------------------------------------------------------------------------------

    def _train(self) -> None:
        fault = self.fault
        self.at("start-up")
        if self.guilty and fault.phase == "compile" and fault.kind in STRIKES:
            _at_trace.append(self.strike)
        compiled = self._compiled()
        optimizer = torch.optim.SGD(compiled.parameters(), lr=self._unless("another lr", 0.3, 0.1))
        with self._inside():
            for self.step in range(1, STEPS + 1):
                self._step(compiled, optimizer)
            path = self.folder / "checkpoint"
            self._saved(lambda: fxdp.save(path, compiled, optimizer, step=self.step), "saving")
            self._saved(lambda: fxdp.load(path, compiled, optimizer), "loading")
        compiled.eval()
        with torch.no_grad():
            compiled(*self._batch())
            self.at("eval")
            compiled(*self._batch())

    def _unless(self, kind: str, wrong: Any, right: Any) -> Any:
        """The value of this rank, which is wrong on the one with this fault."""
        if self.guilty and self.fault.kind == kind:
            self.note("fault")
            return wrong
        return right

    def _compiled(self) -> fxdp.CompiledModule:
        torch.manual_seed(0)
        stages = self.fault.mode == "pp"
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")) if stages else None
        model = Net(stages, self._unless("another model", 9, 8))
        options: dict[str, Any] = {"check_replicas": 2}
        if stages:
            options["microbatches"] = self._unless("another option", 1, 2)
        else:
            options["bucket_mb"] = self._unless("another option", 1.0, 25.0)
        compute = "inductor" if self.fault.mode == "inductor" else "eager"
        return fxdp.compile(model, mesh, compute=compute, **options)

    def _batch(self) -> tuple[Tensor, Tensor]:
        own = 0 if self.fault.mode == "pp" else self.rank
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
            self.note("fault")
            call = lambda: change(compiled, x, y)  # noqa: E731
        else:
            call = lambda: compiled(x, y)  # noqa: E731
        try:
            call()
        except Exception as error:
            self.note("refused", _words(error))
        else:
            self.note("accepted")

    def _saved(self, action: Callable[[], Any], phase: str) -> None:
        if self.guilty and self.fault.phase == phase and self.fault.kind in STRIKES:
            name = "_write" if phase == "saving" else "_read"
            with mock.patch.object(saving, name, side_effect=self._strike_with):
                action()
        action()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """The fault inside of a sum, or of a stage."""
        owners: tuple[Any, ...] = ()
        if self.guilty and self.fault.kind in STRIKES and self.fault.phase in ("forward", "backward"):
            stages = (
                (Forward,) if self.fault.phase == "forward" else (Backward, InputGradient, WeightGradient)
            )
            owners = stages if self.fault.mode == "pp" else (MessageGroup,)
        with contextlib.ExitStack() as stack:
            for owner in owners:
                name = "allreduce" if owner is MessageGroup else "forward"
                stack.enter_context(mock.patch.object(owner, name, self._struck(getattr(owner, name))))
            yield

    def _struck(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed_run(this: Any, *args: Any, **kwargs: Any) -> Any:
            here = self.fault.mode == "pp" or self.where == self.fault.phase
            if here and self.step == STEP and not self.done:
                self.done = True
                self.strike()
            return run(this, *args, **kwargs)

        return disturbed_run


def _words(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
