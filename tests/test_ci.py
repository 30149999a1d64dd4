"""What `.ci/` promises: each proven torch has its run, and a machine without room passes all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
