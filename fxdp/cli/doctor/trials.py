"""The doctor's checks: a small model on virtual and real ranks, and faults of torch with workarounds."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
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
from fxdp.cli.doctor.found import inductor_cache
from fxdp.cli.doctor.section import Row, Section
from fxdp.errors import ExactnessError, RankFailedError, StateError
from fxdp.settings.launch import compile_into
from fxdp.torch_compat import Mend, releases
from fxdp.torch_compat import mends as mends_known

_TOLERANCE = 1e-9
_SPLIT = (5, 3)
_RANKS_S = 240.0
_CACHES = "fxdp.disk"
"""Logger of fxdp's caches."""


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


def checks(of_caches: list[str]) -> Iterator[Row]:
    """Run all checks one after another; each is timed, and a failure does not stop later checks.

    Warnings about fxdp's cache, without which results are the same, fail no check: `of_caches` gets them.
    """
    # ranks are forks: these run first, because a process that has compiled has threads
    yield _checked("2 ranks, eager", partial(_on_ranks, "eager", "replicate", of_caches))
    yield _checked("2 ranks, Inductor", partial(_compiled_on_ranks, of_caches))
    yield _checked("2 ranks, sharded", partial(_on_ranks, "eager", "shard", of_caches))
    yield _checked("4 virtual ranks", partial(_verified, of_caches))


def _checked(name: str, check: Callable[[], float]) -> Row:
    began = time.perf_counter()
    try:
        error = check()
    except Exception as failure:
        return Row(name, _failure(failure), ok=False)
    text = f"as one device, largest difference {error:.1e} ({time.perf_counter() - began:.1f} s)"
    return Row(name, text)


def _failure(failure: Exception) -> str:
    """Return the message of an error, with the innermost place; of a rank's traceback, only that place."""
    said, _, on_rank = str(failure).partition("\nTraceback ")
    frames = re.findall(r'File "(?:.*/)?(.+)", line (\d+)', on_rank)
    last = traceback.extract_tb(failure.__traceback__)[-1]
    file, line = frames[-1] if frames else (last.filename.rpartition("/")[2], last.lineno)
    return f"{type(failure).__name__}: {said} (at {file}:{line})"


def _verified(of_caches: list[str]) -> float:
    model, x, y = _subject(sum(_SPLIT))
    warned = _Warned(_CACHES)
    report = fxdp.verify(model, (x, y), mesh={"dp": 4})
    of_caches += warned.texts(_CACHES)
    if not report.ok:
        raise ExactnessError(str(report))
    return report.worst


def _compiled_on_ranks(of_caches: list[str]) -> float:
    """Check with Inductor; after a failure check again with an empty cache, to find a damaged cache."""
    try:
        return _on_ranks("inductor", "replicate", of_caches)
    except RankFailedError as failure:
        with tempfile.TemporaryDirectory() as empty:
            try:
                _on_ranks("inductor", "replicate", [], cache=empty)
            except RankFailedError:
                raise failure from None
        raise StateError(
            f"files in Inductor's cache are damaged; with an empty one all is well: delete {inductor_cache()}"
        ) from None


def _on_ranks(backend: str, strategy: str, of_caches: list[str], cache: str | None = None) -> float:
    found = fxdp.launch(_one_rank, backend, strategy, cache, nproc=len(_SPLIT), timeout=_RANKS_S)
    for _, texts in found:
        of_caches += texts
    error = max(difference for difference, _ in found)
    if not error <= _TOLERANCE:
        raise ExactnessError(f"a loss or gradient differs from one device's by {error:.1e}")
    return float(error)


def _one_rank(backend: str, strategy: str, cache: str | None) -> tuple[float, list[str]]:
    """Compare loss and gradients of one step on this rank with one device; return also what caches warned."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if cache is not None:
        compile_into(cache)
    model, x, y = _subject(sum(_SPLIT))
    single = copy.deepcopy(model)
    compiled = fxdp.compile(model, backend=backend, strategy=strategy)
    begin = sum(_SPLIT[: dist.get_rank()])
    part = slice(begin, begin + _SPLIT[dist.get_rank()])
    warned = _Warned("fxdp")  # fxdp warns if Inductor cannot compile the program
    loss, expected = compiled(x[part], y[part]), single(x, y)
    loss.backward()
    expected.backward()
    apart = [loss - expected]
    for ours, theirs in zip(compiled.parameters(), single.parameters(), strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        if grad is None or theirs.grad is None:
            raise ExactnessError("a parameter has no gradient")
        apart.append(grad - theirs.grad)
    for text in warned.texts("fxdp"):
        raise StateError(text)
    return max(float(one.abs().max()) for one in apart), warned.texts(_CACHES)


class _Warned(logging.Handler):
    """Log handler that collects the warnings of a logger and of those below it."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._records: list[logging.LogRecord] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def texts(self, name: str) -> list[str]:
        """Return the warnings that this very logger was given."""
        return [record.getMessage() for record in self._records if record.name == name]


def mends() -> Section:
    """Return the faults of torch that fxdp works around, and whether the installed release has each."""
    return Section("torch's faults that fxdp mends", tuple(map(_mended, mends_known())))


def _mended(mend: Mend) -> Row:
    """Report whether a workaround is needed here; of a release that is not proven that is not known."""
    version = releases.installed()
    if not releases.is_proven(version):
        return Row(mend.name, f"in use, needed or not: {mend.fault}")
    needed = releases.release(version) in mend.releases
    return Row(mend.name, f"{'needed here' if needed else 'mended by torch'}: {mend.fault}")
