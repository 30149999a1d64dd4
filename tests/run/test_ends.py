"""A rank is killed, the user interrupts, a rank leaves: all end, and the cause is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S
from tests.run.running import ROOT

_SCRIPT = """
import os, sys, time
import torch
from torch.utils.data import DataLoader
rank = int(os.readlink("/proc/self/fd/1").endswith("rank1.txt"))
loader = DataLoader(torch.ones(4, 3), 4)
for epoch in range(10**6):
    for x in loader:
        x.sum().item()
    time.sleep(0.05)  # others begin beside it
    if epoch == 1:
        print("ready", flush=True)
        if rank and sys.argv[1:] == ["leaves"]:
            sys.exit(0)
"""


def _rank_of(run: subprocess.Popen[str], rank: int) -> int:
    return int(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[rank])


def _killed(run: subprocess.Popen[str]) -> None:
    os.kill(_rank_of(run, 1), signal.SIGKILL)


def _terminated(run: subprocess.Popen[str]) -> None:
    os.kill(_rank_of(run, 0), signal.SIGTERM)


def _interrupted(run: subprocess.Popen[str]) -> None:
    run.send_signal(signal.SIGINT)


def _left(_: subprocess.Popen[str]) -> None:
    """Leave it to the script."""


WAYS: dict[Callable[[Any], None], tuple[int, tuple[str, ...]]] = {
    _killed: (1, ("Error: rank 1 ended without an error message (killed?", "rank 1 of 2 died of SIGKILL")),
    _terminated: (143, ("rank 0 of 2 died of SIGTERM",)),
    _interrupted: (130, ("train.py", "KeyboardInterrupt")),
    _left: (1, ("rank 1 ended its process while this rank still needed it; expected the same number of",)),
}  # fmt: skip

_HEARS_INTERRUPTS = ("env", "--default-signal=INT")
"""What a shell runs in the background ignores Ctrl-C, and so do its children."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[int, str, list[str]]]:
    """Exit code, standard error, and what is left in the folder: all at once, as most of each is waiting."""
    started = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for way in WAYS:
        folder = tmp_path_factory.mktemp(way.__name__)
        (folder / "train.py").write_text(_SCRIPT)
        options = ["--nproc", "2", "--logs", str(folder / "logs")]
        command = [*_HEARS_INTERRUPTS, sys.executable, "-m", "fxdp", "run", *options]
        command += [str(folder / "train.py"), "leaves" if way is _left else ""]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[way] = folder, subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
    for _, run in started.values():  # what begins is most of the work: an end beside it takes longer
        assert run.stdout.readline() == "ready\n", run.communicate()[1]
    found = {}
    for way, (folder, run) in started.items():
        way(run)
        found[way] = run.communicate(timeout=HANG_S)[1], folder, run.returncode
    return {
        way: (code, said, sorted(str(file.relative_to(folder)) for file in folder.rglob("*")))
        for way, (said, folder, code) in found.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_end_and_the_cause_is_told(ended: Any, way: Callable[[Any], None]) -> None:
    code, said, left = ended[way]
    expected, words = WAYS[way]
    assert code == expected, said
    for word in words:
        assert word in said
    assert left == ["logs", "logs/rank1.txt", "train.py"]
