"""What the doctor runs, and what it says where something fails."""

from __future__ import annotations

import pytest
import torch

from fxdp.cli.doctor import trials
from fxdp.cli.parser import main
from fxdp.errors import ExactnessError
from fxdp.torch_compat import mends, releases


def test_the_small_model_on_virtual_ranks() -> None:
    assert trials._verified() <= 1e-9


def test_a_check_that_fails_is_named_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> float:
        raise ExactnessError("a gradient differs from one device's by 3.0e-02")

    monkeypatch.setattr(trials, "_on_ranks", fails)
    monkeypatch.setattr(trials, "_verified", lambda: 1e-16)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: ExactnessError: a gradient differs") == 3
    assert "4 virtual ranks   as one device, largest difference 1.0e-16" in said
    assert "something FAILED, see above" in said.splitlines()[-1]
    assert max(map(len, said.splitlines())) <= 80 or "caches" in said  # a path has no place to break at


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
