"""The doctor's checks: a small model on virtual and real ranks, and faults of torch with workarounds."""

from __future__ import annotations

import copy
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.cli.doctor.section import Row, Section
from fxdp.errors import ExactnessError, StateError
from fxdp.torch_compat import Mend, releases
from fxdp.torch_compat import mends as mends_known

_TOLERANCE = 1e-9
_SPLIT = (5, 3)
_RANKS_S = 240.0


class _Small(nn.Module):
    """A layer, a norm over the batch, and a mean over valid targets: each of the three needs other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.relu(self.norm(self.first(x)))), y, ignore_index=-100)


def _subject(samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (samples,), generator=generator)
    y[::3] = -100
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return _Small().double(), x, y


def checks() -> Iterator[Row]:
    """Run all checks one after another; each is timed, and a failure does not stop later checks."""
    # ranks are forks: these run first, because a process that has compiled has threads
    yield _checked("2 ranks, eager", partial(_on_ranks, "eager", "replicate"))
    yield _checked("2 ranks, Inductor", partial(_on_ranks, "inductor", "replicate"))
    yield _checked("2 ranks, sharded", partial(_on_ranks, "eager", "shard"))
    yield _checked("4 virtual ranks", _verified)


def _checked(name: str, check: Callable[[], float]) -> Row:
    began = time.perf_counter()
    try:
        error = check()
    except Exception as failure:
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return Row(name, f"{type(failure).__name__}: {failure} (at {where})", ok=False)
    text = f"as one device, largest difference {error:.1e} ({time.perf_counter() - began:.1f} s)"
    return Row(name, text)


def _verified() -> float:
    model, x, y = _subject(sum(_SPLIT))
    report = fxdp.verify(model, (x, y), mesh={"dp": 4})
    if not report.ok:
        raise ExactnessError(str(report))
    return report.worst


def _on_ranks(backend: str, strategy: str) -> float:
    found = fxdp.launch(_one_rank, backend, strategy, nproc=len(_SPLIT), timeout=_RANKS_S)
    error = max(found)
    if not error <= _TOLERANCE:
        raise ExactnessError(f"a loss or gradient differs from one device's by {error:.1e}")
    return float(error)


def _one_rank(backend: str, strategy: str) -> float:
    """Return the difference of loss and gradients of one step from one device, on this rank."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    model, x, y = _subject(sum(_SPLIT))
    single = copy.deepcopy(model)
    compiled = fxdp.compile(model, backend=backend, strategy=strategy)
    begin = sum(_SPLIT[: dist.get_rank()])
    part = slice(begin, begin + _SPLIT[dist.get_rank()])
    said = _Warned()
    logging.getLogger("fxdp").addHandler(said)  # fxdp warns if Inductor cannot compile the program
    loss, expected = compiled(x[part], y[part]), single(x, y)
    loss.backward()
    expected.backward()
    apart = [loss - expected]
    for ours, theirs in zip(compiled.parameters(), single.parameters(), strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        if grad is None or theirs.grad is None:
            raise ExactnessError("a parameter has no gradient")
        apart.append(grad - theirs.grad)
    if said.lines:
        raise StateError(said.lines[0])
    return max(float(one.abs().max()) for one in apart)


class _Warned(logging.Handler):
    """Log handler that collects the warnings of fxdp."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def mends() -> Section:
    """Return the faults of torch that fxdp works around, and whether the installed torch has each."""
    return Section("torch's faults that fxdp mends", tuple(map(_mended, mends_known())))


def _mended(mend: Mend) -> Row:
    """Report whether a workaround is needed here; on proven releases programs with Inductor are not run."""
    if mend.compiles and releases.is_proven():
        needed = releases.release(releases.installed()) in mend.releases
        return Row(mend.name, f"{_needed(needed)} (known of this release): {mend.fault}")
    try:
        return Row(mend.name, f"{_needed(mend.has_fault())}: {mend.fault}")
    except Exception as error:
        return Row(mend.name, f"{type(error).__name__}: {error}", ok=False)


def _needed(has_fault: bool) -> str:
    return "needed here" if has_fault else "mended by torch"
