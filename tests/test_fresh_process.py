"""What only a process shows that has imported nothing yet: one in all, as each imports torch anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxdp
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[1]

_FIRST = """
import sys
system, sys.platform = sys.platform, "win32"
try:
    import fxdp
except Exception as error:
    assert str(error).startswith("fxdp does not run on Windows") and len(str(error).splitlines()) == 1
else:
    raise AssertionError("imported on Windows")
sys.platform = system
for name in [name for name in sys.modules if name.startswith("fxdp")]:
    del sys.modules[name]
import fxdp.errors
from fxdp.cli import main
try:
    main(["--help"])
except SystemExit:
    assert fxdp.__version__ and not {"torch", "rich", "numpy"} & sys.modules.keys()
    assert main(["run", "missing.py"]) == main(["run", "--nproc", "0", "-m", "train"]) == 2
    assert "torch" not in sys.modules
    assert fxdp.S(0) == fxdp.ir.types.placements.S(0) and fxdp.skip.stash and "torch" in sys.modules

import torch
from torch._subclasses import FakeTensorMode
from fxdp.torch_compat import trace_for_inductor
assert "fxdp" in torch._dynamo.list_backends() and "fxdp.dynamo.backend" not in sys.modules
"""

_STEP = """
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 3))
compiled, x = fxdp.compile(model, backend="inductor"), torch.ones(2, 3)
compiled(x).sum().backward()
with torch.autograd.profiler.profile() as seen:
    compiled(x)
assert any("CompiledFxGraph" in event.name for event in seen.function_events)
"""

_LATE = """
assert not {"torch._inductor.select_algorithm", "torch.utils.cpp_extension"} & sys.modules.keys()
assert "torch._inductor.lowering" not in sys.modules
mode, pool = FakeTensorMode(), torch.ops.aten.max_pool2d_with_indices
x = mode.from_tensor(torch.ones(1, 1, 4, 4))
trace_for_inductor(lambda p, t: [pool(p[0], [2, 2])[0]], mode, [x], [])

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
loss = lambda y, target: (y - target).square().mean()
x = torch.randn(4, 4)
given = {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"microbatches": 2}, "loss_fn": loss}
fxdp.plan(model, (x,), {"target": torch.randn(4, 2)}, **given)
"""


def test_what_is_imported_when_the_first_model_may_pool_and_the_environment_turns_channels_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch takes seconds; help, errors and the version need none. Torch lists the backend without
    importing it. A program that is kept imports none of Inductor's code generators, and is profiled as one
    that is not. Its decomposition of max pooling needs a module of Inductor that is not imported by then.
    And the channels of the log and of the structured trace have what a compilation decided.
    """
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    with monkeypatch.context() as plain:  # the settings of other programs: kept is what they would find
        plain.setattr("torch._dynamo.config.fake_tensor_cache_enabled", True)
        plain.setattr("torch._inductor.config.aot_inductor.compile_wrapper_opt_level", "O1")
        exec(_STEP, {"torch": torch, "fxdp": fxdp})
    path = os.pathsep.join([str(ROOT), str(_installed(tmp_path))])
    channels = {"TORCH_LOGS": "+fxdp", "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": path}
    shown = subprocess.run(
        [sys.executable, "-c", _FIRST + _STEP + _LATE], env={**os.environ, **channels},
        capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    assert all(f"\n    {name} " in shown.stdout for name in ("demo", "verify", "plan", "explain", "rules"))
    assert "captured a joint graph of" in shown.stderr
    assert "Sequential on mesh(pp=2, dp=2), a batch of 8" in shown.stderr
    assert "rank 1: .  F0" in shown.stderr
    found = _artifacts(tmp_path / "trace")
    assert "%_0_weight: f32[4, 4] = param(0.weight)" in found["fxdp_joint_graph"]
    assert "all_reduce" not in found["fxdp_joint_graph"]
    assert "dp=P(sum)" in found["fxdp_placements"]
    assert {"send", "all_reduce"} <= {row["kind"] for row in json.loads(found["fxdp_communication"])}
    assert found["fxdp_schedule"].startswith("rank 0: F0")


def _installed(folder: Path) -> Path:
    """A folder in which fxdp's backend is known to torch, as pip writes it."""
    installed = folder / "fxdp-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fxdp\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nfxdp = fxdp.dynamo.backend:backend\n"
    )
    return folder


def _artifacts(folder: Path) -> dict[str, str]:
    """The last texts of the structured trace by name; each stands, indented, below the line that names it."""
    (file,) = folder.iterdir()
    found: dict[str, list[str]] = {}
    name = ""
    for line in file.read_text().splitlines():
        if not line.startswith("\t"):
            about = json.loads(line.partition("] ")[2] or "{}")
            name = about.get("artifact", {}).get("name", "")
            found[name] = []
        else:
            found[name].append(line[1:])
    return {name: "\n".join(lines) for name, lines in found.items()}
