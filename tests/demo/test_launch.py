"""The local launcher: ranks meet, a failure is shown and stops the others, nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxdp.demo.launch import launch

_IMPORTS = "import os, time; "
_MEET = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
dist.destroy_process_group()
"""
_RANK_1_FAILS = """
import os, sys, time
open(sys.argv[1] + os.environ["RANK"], "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    sys.exit("the cause, in rank 1")
time.sleep(60)
"""


def _python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_ranks_meet_and_rank_0_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(_python(_MEET), 2) == 0
    assert capfd.readouterr().out == "rank 0 of 2 sum 3.0\n"


def test_a_failure_stops_the_others_and_is_shown(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.monotonic()
    assert launch(_python(_RANK_1_FAILS, str(tmp_path / "pid")), 3) == 1
    assert time.monotonic() - start < 30
    assert capfd.readouterr().err == "rank 1 ended with exit code 1:\nthe cause, in rank 1\n"
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_a_rank_that_is_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), 9); time.sleep(60)"
    assert launch(_python(code), 2) == 128 + 9
    assert "rank 0 ended with signal 9" in capfd.readouterr().err


def test_a_launcher_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    nap = f"open({str(tmp_path / 'pid')!r} + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    command = f"[sys.executable, '-c', {_IMPORTS + nap!r}]"
    code = f"import sys; from fxdp.demo.launch import launch; launch({command}, 2)"
    with subprocess.Popen(_python(code)) as launcher:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        launcher.terminate()
        assert launcher.wait(30) == 128 + 15
    assert len(list(tmp_path.iterdir())) == 2
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_a_time_limit_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(_python("import time; time.sleep(60)"), 2, timeout=1) == 124
    assert "stopped after 1 s" in capfd.readouterr().err


def test_the_environment_is_torchruns(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'EXTRA')))"
    assert launch(_python(code), 2, environment={"EXTRA": "x"}) == 0
    assert capfd.readouterr().out == "0 2 0 x\n"
