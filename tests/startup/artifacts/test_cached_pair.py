"""Code from the disk computes what compiled code computes, on one rank and beside a rank without."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.compiler.emit import FULL, WantedPart, lower_part
from fxdp.disk.entries import Entries
from fxdp.disk.private_folder import PrivateFolder
from fxdp.errors import StateError
from fxdp.lowering.eager import lower_eager
from fxdp.lowering.inductor.compile import lower_inductor
from fxdp.lowering.inductor.start import Start
from fxdp.module.dry_run import _local_program
from fxdp.options import Options
from fxdp.startup.artifacts import cached_pair as module
from tests.rank_pool import RankPool

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class _Net(nn.Module):
    """Two results that can be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh(), x @ self.linear.weight.t()


def _steps(
    model: nn.Module, batches: tuple[int, ...], *, second: bool = True, backend: str = "inductor"
) -> list[Tensor]:
    """Results and gradients of some steps; `second`: of both results, not of the first alone."""
    compiled, found = fxdp.compile(copy.deepcopy(model), backend=backend), []
    for batch in batches:
        one, two = compiled(torch.arange(3 * batch).double().reshape(batch, 3).sin())
        (one.square().sum() + (two.cos().sum() if second else 0.0)).backward()
        found += [one.detach(), two.detach()]
    return [*found, *(p.grad for p in compiled.parameters())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries are kept while a test runs."""
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_hit_equals_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first sizes, for any, and a backward that was not compiled when the halves were kept."""
    model = _Net()
    made = _steps(model, (4, 5))
    alone = _steps(model, (4,), second=False, backend="eager")
    # the joint graph, the halves for batch 4 and for any, and where the kernels of each half lie
    assert len(list(folder.iterdir())) == 7
    with monkeypatch.context() as patch:
        patch.setattr(lower_inductor, "own", _never)
        found = _steps(model, (4, 5))
    assert all(map(torch.equal, found, made))
    assert all(map(torch.allclose, _steps(model, (4,), second=False), alone))


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("compiled anew")


def test_a_backward_that_does_not_fit_the_kept_forward_is_refused() -> None:
    pair = lower_eager(_local_program(_Net(), (torch.ones(4, 3).double(),), {}, {"dp": 1}, Options())[0].gm)
    assert module._same(pair, module._digest(pair)) is pair
    with pytest.raises(StateError, match="does not fit its forward, which was kept on disk; set FXDP_CACHE"):
        module._same(pair, "another")


class _StopError(Exception):
    """A key was asked for, which is all that a test wants."""


def test_what_changes_code_makes_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor_config

    keys: list[str] = []

    def key_of(*parts: str) -> str:
        keys.append("\n".join(parts))
        raise _StopError

    unopened = Entries(PrivateFolder(Path("opened by nobody"), 0))
    monkeypatch.setattr(module, "key_of", key_of)

    def lower(model: nn.Module, size: int = 4, *, mesh: int = 1, generic: bool = False) -> None:
        local, _ = _local_program(model, (torch.ones(4, 3).double(),), {}, {"dp": mesh}, Options())
        sizes = {"B": size * mesh, "b": size, "offset": 0, "b_max": size}
        wanted = WantedPart(FULL, local.partition.parts[0], sizes, (size,) * mesh, 0)
        with pytest.raises(_StopError), mock.patch.object(Entries, "within", return_value=unopened):
            lower_part(wanted, local, model, generic=generic, compiled=True, start=Start())

    model, turned = _Net(), _Net()
    turned.linear.weight.data = turned.linear.weight.data.t().contiguous().t()
    lower(model)
    lower(_Net())
    lower(model, 5)
    lower(model, generic=True)
    lower(model, mesh=2)
    lower(turned)
    with inductor_config.patch(max_fusion_size=7):
        lower(model)
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6


def _beside(folder: str) -> tuple[bool, list[int]]:
    """Two trainings: both ranks compile, then rank 1 finds its code; whether they are equal, and entries."""
    rank = dist.get_rank()
    os.environ["FXDP_CACHE"] = "1"
    found, entries = [], []
    try:
        for name in ("first", "first" if rank else "second"):
            os.environ["FXDP_CACHE_DIR"] = f"{folder}/{rank}/{name}"
            torch.manual_seed(0)
            found.append(_steps(_Net(), (2 + rank,)))
            entries.append(len(list(Path(folder, str(rank)).glob("*/*"))))
    finally:
        os.environ["FXDP_CACHE"] = "0"
    return all(map(torch.equal, *found)), entries


def test_a_rank_that_finds_its_code_meets_one_that_does_not(ranks: RankPool, tmp_path: Path) -> None:
    # the joint graph, the halves, and where the kernels of both lie
    assert ranks.run(2, _beside, str(tmp_path)) == [(True, [4, 8]), (True, [4, 4])]
