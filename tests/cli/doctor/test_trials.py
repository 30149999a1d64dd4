"""What the doctor runs, and what it says where something fails."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from fxdp.cli.doctor import trials
from fxdp.cli.doctor.section import _NAME
from fxdp.cli.parser import main
from fxdp.disk import entries
from fxdp.errors import ExactnessError, RankFailedError
from fxdp.torch_compat import mends, releases
from tests.documents import DOCS


def test_the_small_model_on_virtual_ranks() -> None:
    assert trials._verified([]) <= 1e-9


def test_a_check_that_fails_is_named_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> float:
        raise ExactnessError("a gradient differs from one device's by 3.0e-02")

    monkeypatch.setattr(trials, "_on_ranks", fails)
    monkeypatch.setattr(trials, "_verified", lambda _: 1e-16)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: ExactnessError: a gradient differs") == 3
    assert "4 virtual ranks   as one device, largest difference 1.0e-16" in said
    assert "something FAILED, see above" in said.splitlines()[-1]
    assert max(map(len, said.splitlines())) <= 80 or "caches" in said  # a path has no place to break at
    shown = re.search(r"```text\n(versions\n.*?)```", (DOCS / "environment.md").read_text(), re.DOTALL)
    assert shown
    rows = iter(said.splitlines())
    for line in shown[1].replace("...\n", "").splitlines()[:-1]:
        name = line[:_NAME] if line.startswith(" ") else line.partition(":")[0]
        assert any(row.startswith(name) for row in rows), f"{name!r} of the page is not printed in this order"


def test_a_rank_that_fails_is_one_line_with_its_innermost_place() -> None:
    def fails() -> float:
        raise RankFailedError(
            "rank 1 of 2 raised StateError: no g++\nTraceback (most recent call last):\n"
            '  File "/a/launcher.py", line 169, in _be_rank\n    run()\n  File "/b/c.py", line 7, in f\n'
        )

    row = trials._checked("2 ranks", fails)
    assert not row.ok
    assert row.text == "RankFailedError: rank 1 of 2 raised StateError: no g++ (at c.py:7)"


@pytest.mark.parametrize("empty_cache", ["well", "fails"])
def test_a_damaged_cache_of_inductor_is_told_from_other_causes(
    monkeypatch: pytest.MonkeyPatch, empty_cache: str
) -> None:
    def on_ranks(*_: object, cache: str | None = None) -> float:
        if cache is None or empty_cache == "fails":
            raise RankFailedError("rank 0 of 2 raised StateError: Inductor cannot compile this program")
        assert Path(cache).is_dir()
        return 0.0

    monkeypatch.setattr(trials, "_on_ranks", on_ranks)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    said = trials._checked("2 ranks, Inductor", partial(trials._compiled_on_ranks, [])).text
    assert ("are damaged; with an empty one all is well: delete /somewhere" in said) == (
        empty_cache == "well"
    )
    assert ("Inductor cannot compile" in said) == (empty_cache == "fails")


def test_warnings_of_the_cache_fail_no_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "file"))
    entries._say.cache_clear()
    of_caches: list[str] = []
    assert trials._on_ranks("eager", "replicate", of_caches) <= 1e-9
    (text,) = of_caches
    assert text.startswith(f"the cache of captures is not used: {tmp_path}/file is a file. ")


def test_mends_of_this_release() -> None:
    rows = {row.name: row.text for row in trials.mends().rows}
    release = releases.release(torch.__version__)
    for mend in mends():
        assert rows[mend.name].startswith("needed here" if release in mend.releases else "mended by torch")


def test_quick_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("versions\n  fxdp ")
    assert "checks" not in said
    assert "all is well" in said
