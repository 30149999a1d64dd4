"""What `.ci/` promises: each proven torch has its run, and a machine without room passes all the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxdp.torch_compat.releases import PROVEN, release
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
NEWEST = (ROOT / ".ci" / "newest.txt").read_text().strip().removeprefix("torch==")


def _without_room(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """What it says where `df` says that there are 7 GB."""
    program = folder / "bin" / "df"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho; echo /dev/disk 9000000 1000000 8000000 11% /\n")
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [ROOT / ".ci" / "environment", NEWEST],
        env={**os.environ, "PATH": path, "FXDP_CI_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_all_proven_releases_have_their_run() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| oldest")[2]
    (others,) = re.findall(r"`\.ci/releases (2\.[\d. ]+)`", table)
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert release(NEWEST) == PROVEN[-1]
    assert sorted(map(release, (*others.split(), pinned, NEWEST))) == sorted(PROVEN)


def test_no_room_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = _without_room(tmp_path, cache)
    assert (found.returncode, found.stdout) == (1, "")
    (line,) = found.stderr.splitlines()
    assert line == f"no environment with torch {NEWEST}: {cache} has 7 GB of room, it takes 12"
    assert [kept.name for kept in cache.iterdir()] == ["lock"]


def test_what_was_broken_off_and_what_nobody_uses_goes(tmp_path: Path) -> None:
    for name, age in (("torch-2.1.0-broken", None), ("torch-2.2.0-old", 8 * 86400), ("torch-2.3.0-used", 0)):
        (tmp_path / name).mkdir()
        if age is not None:
            (tmp_path / name / "whole").touch()
            then = (tmp_path / name / "whole").stat().st_mtime - age
            os.utime(tmp_path / name / "whole", (then, then))
    assert _without_room(tmp_path, tmp_path).returncode == 1
    assert sorted(kept.name for kept in tmp_path.glob("torch-*")) == ["torch-2.3.0-used"]


def _run_with(folder: Path, slow_s: int = 1200, **programs: str) -> subprocess.CompletedProcess[str]:
    """`.ci/run` among programs that each say their name, but for those of `programs`."""
    names = ["pip", "python", "ruff", "mypy", "fxdp", "core", "wings", "wheel", "docs", "environment"]
    (folder / "made").mkdir()
    (folder / ".ci").mkdir()
    for name in names:
        program = folder / ("made" if name in names[:5] else ".ci") / name
        program.write_text(f"#!/bin/bash\n{programs.get(name, f'echo said by {name}')}\n")
        program.chmod(0o755)
    for name in ("run", "newest.txt"):
        shutil.copy(ROOT / ".ci" / name, folder / ".ci" / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").write_text("#!/bin/bash\nmkdir -p .venv && cp -r made .venv/bin\n")
    (folder / "bin" / "python3").chmod(0o755)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "FXDP_CI_CACHE": str(folder),
        "FXDP_CI_NEWEST": "1",
        "FXDP_CI_SLOW_S": str(slow_s),
    }
    return subprocess.run(
        [folder / ".ci" / "run"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_what_runs_behind_the_tests_is_told_in_order(tmp_path: Path) -> None:
    found = _run_with(tmp_path, python="sleep 1; echo said by python")
    behind = [f"torch {NEWEST}", "core", "wings", "mypy", "wheel", "docs"]
    said = ["pip", "python", "ruff", "ruff", "seconds", *behind, "seconds"]
    lines = re.sub("(?m)^processor time of .* [1-9]\\d* s$", "seconds", found.stdout.replace("said by ", ""))
    assert lines.split("\n") == [*said, ""], found.stderr
    assert found.returncode == 0


@pytest.mark.parametrize("broken", ["python", "ruff", "core", "wings", "mypy", "wheel", "docs"])
def test_whatever_fails_fails_the_run(tmp_path: Path, broken: str) -> None:
    found = _run_with(tmp_path, **{broken: "echo broken; exit 3"})
    assert found.returncode
    assert "broken" in found.stdout


def test_an_environment_that_is_not_to_be_had_is_told(tmp_path: Path) -> None:
    found = _run_with(tmp_path, environment="echo why >&2; exit 1")
    assert found.returncode == 0
    assert f"why\ntorch {NEWEST} is left out: its environment could not be had" in found.stdout
    assert "said by core" not in found.stdout


def test_a_slow_machine_leaves_the_newest_torch_and_the_core_alone_out(tmp_path: Path) -> None:
    found = _run_with(tmp_path, slow_s=0, python="sleep 1.1; echo said by python")
    assert found.returncode == 0
    assert f"torch {NEWEST} is left out: the tests took " in found.stdout
    assert "said by core" not in found.stdout
    assert "the core without wings is left out: .ci/wings PYTHON runs it\n" in found.stdout
    assert "said by wings" not in found.stdout
    assert "said by mypy\nsaid by wheel\nsaid by docs" in found.stdout


def test_nothing_runs_on_behind_tests_that_failed(tmp_path: Path) -> None:
    lasting = f"echo $$ >> {tmp_path}/pids; exec sleep {HANG_S:g}"
    failing = f"until [ -s {tmp_path}/pids ]; do sleep 0.1; done; exit 3"
    begin = time.monotonic()
    found = _run_with(tmp_path, environment=lasting, python=failing)
    assert found.returncode == 3
    assert time.monotonic() - begin < HANG_S
    for pid in (tmp_path / "pids").read_text().split():
        while Path("/proc", pid).exists():  # until the test's limit
            time.sleep(0.01)
