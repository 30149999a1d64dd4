"""The core alone, in processes with `FXDP_WINGS=off`: equal numbers, no line of a wing, refusals by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxdp.errors import MeshError, StateError
from fxdp.settings import wings_are_on
from fxdp.torch_compat.releases import release
from fxdp.wings import Seam, seam
from tests.limits import HANG_S
from tests.rooms import WINGS

ROOT = Path(__file__).resolve().parents[1]

_TRAIN = """
import random, sys, torch, fxdp
from torch import nn

class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.sign()
    @staticmethod
    def backward(ctx, gradient): return gradient

class Straight(nn.Linear):
    def forward(self, x): return Sign.apply(super().forward(x))

class Drawn(nn.Linear):
    def forward(self, x): return super().forward(x) * random.randint(1, 3)

class Summed(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        torch.distributed.all_reduce(y)
        return y

def refusal(model):
    try:
        fxdp.compile(model)(torch.ones(4, 3))
    except fxdp.CaptureError as error:
        return str(error)

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 1)).double()
x = torch.randn(6, 3, dtype=torch.float64)
wanted = plain(x).square().mean()
compiled = fxdp.compile(plain, loss_fn=lambda y, target: (y - target).square().mean())
loss = compiled(x, target=torch.zeros(6, 1, dtype=torch.float64))
loss.backward()
assert abs(loss.item() - wanted.item()) < 1e-12 and plain[0].weight.grad is not None
assert "Sign is not captured with FXDP_WINGS=off" in refusal(Straight(3, 2)), refusal(Straight(3, 2))
assert "random.randint draws a random number in Python" in refusal(Drawn(3, 2))
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert "torch.distributed.all_reduce in a model is not captured" in refusal(Summed(3, 2))
dist.destroy_process_group()
normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
assert fxdp.verify(normed, (torch.randn(6, 3),), mesh={"dp": 2}).ok
print("wings:", *sorted(name for name in sys.modules if name.split(".")[:2] in WINGS))
import fxdp.dynamo.backend
try:
    torch.compile(nn.Linear(3, 2), backend="fxdp", fullgraph=True)(torch.ones(4, 3))
except Exception as error:
    print(error)
"""


def _run(folder: Path, program: str) -> str:
    file = folder / "program.py"
    file.write_text(program)
    ended = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "FXDP_WINGS": "off", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_the_core_trains_and_refuses_alone(tmp_path: Path) -> None:
    wings = [["fxdp", name] for name in WINGS]
    first, *then = _run(tmp_path, _TRAIN.replace("in WINGS", f"in {wings}")).splitlines()
    assert first.strip() == "wings:"
    assert 'torch.compile(backend="fxdp") is left out by FXDP_WINGS=off' in "\n".join(then)


def test_a_step_touches_little_of_torch() -> None:
    """Attributes are behind the guard (`tests/torch_compat/test_gate.py`); names count if their code ran."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.torch_compat.core_run"],
        env={**os.environ, "FXDP_WINGS": "off", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    found = json.loads(ended.stdout)
    assert len(found["captured"]) <= 40, found["captured"]
    mended = 2 if release(torch.__version__) == "2.11" else 0  # its own faults
    assert len(found["compiled"]) <= 44 + mended, found["compiled"]
    assert len(found["private"]) <= 100, found["private"]


def test_a_setting_that_is_neither_on_nor_off() -> None:
    given = ({}, {"FXDP_WINGS": "on"}, {"FXDP_WINGS": "off"})
    assert [wings_are_on(environment) for environment in given] == [True, True, False]
    with pytest.raises(MeshError, match="FXDP_WINGS is 'of'; expected on or off"):
        wings_are_on({"FXDP_WINGS": "of"})


def test_a_seam_is_extended_once() -> None:
    @seam("startup")
    def doubled(x: int) -> int:
        return 2 * x

    assert isinstance(doubled, Seam)
    assert (doubled(3), doubled.is_extended) == (6, False)
    doubled.extend(lambda own, x: own(x) + 1)
    assert (doubled(3), doubled.is_extended) == (7, True)
    with pytest.raises(StateError, match="doubled is extended twice"):
        doubled.extend(lambda own, x: x)
