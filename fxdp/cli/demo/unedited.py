"""The first part of the demonstration: a script for one device, unedited, by Python and by `fxdp run`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fxdp.errors import RankFailedError
from fxdp.settings.launch import without_gpus

SCRIPT = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(29, 6)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    total, right = 0.0, 0
    for data, target in loader:
        optimizer.zero_grad()
        out = model(data + 0.1 * torch.randn(data.size(0), 6))
        loss = F.cross_entropy(out, target, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(data)
        right += (out.argmax(1) == target).sum().item()
    print(f"epoch {epoch}: loss {total / len(x):.4f}, {right} of {len(x)} right")
torch.save(model.state_dict(), "model.pt")
"""
"""The script of README and docs/run.md."""


def run_unedited(console: Console, ranks: int) -> bool:
    """Run the script on one device and on ranks, on CPUs, and print both; return whether they are the same.

    Raises
    ------
    RankFailedError : the script fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        commands = (["train.py"], ["-m", "fxdp", "run", "--nproc", str(ranks), "train.py"])
        started = [_start(Path(folder, str(place)), command) for place, command in enumerate(commands)]
        one, many = (_output(process) for process in started)
    console.print(f"A script for one device, without an edit, by Python and by fxdp run on {ranks} ranks:")
    for shown, output in (("python train.py", one), (f"fxdp run --nproc {ranks} train.py", many)):
        console.print(f"  $ {shown}", markup=False, highlight=False)
        for line in output.splitlines():
            console.print(f"    {line}", markup=False, highlight=False)
    console.print("  the same lines\n" if one == many else "  NOT THE SAME\n", markup=False)
    return one == many


def _start(folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=without_gpus(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    if process.returncode:
        raise RankFailedError(f"train.py ended with exit code {process.returncode}:\n{errors}")
    return output
