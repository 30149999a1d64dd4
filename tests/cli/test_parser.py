"""The command line: what exists, and how mistakes are answered."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import fxdp
from fxdp.cli import main
from fxdp.errors import FxdpError, MeshError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_the_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: `tests/demo/test_demo.py`."""
    monkeypatch.setattr(sys, "argv", ["fxdp", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxdp", run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert shown.startswith("usage: fxdp")


def test_all_public_names_are_there() -> None:
    assert all(getattr(fxdp, name) for name in fxdp.__all__)
    assert set(fxdp.__all__) <= set(dir(fxdp))
    with pytest.raises(AttributeError, match="module 'fxdp' has no attribute 'compiled'"):
        _ = fxdp.compiled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "tp=2"], "--mesh tp=2: got axis 'tp', expected dp, as in --mesh dp=2."),
        (["--mesh", "dp=many"], "--mesh dp=many: got size 'many', expected a number of ranks"),
        (["--mesh", "dp=0"], "--mesh dp=0: got size '0'"),
        (["--mesh", "2"], "--mesh 2: got axis '2', expected dp"),
        (["--steps", "0"], "--steps 0: at least one step is needed."),
        (["--batch", "0"], "--batch 0: at least one sequence is needed."),
        (
            ["--out", "/no/such/folder/x.png"],
            "there is no folder /no/such/folder. Make it, or name another file.",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fxdp: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    assert not shown.out


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are enough GPUs")
def test_too_few_gpus_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda"]) == 2
    assert "expected 2, one per rank" in capsys.readouterr().err


def test_a_mesh_that_is_not_the_launchers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun = {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert main(["demo", "--mesh", "dp=2"]) == 2
    assert "got 2 ranks, but the launcher started 3" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "run", "port", "verify", "plan", "explain", "rules", "doctor"])
def test_help_fits_into_80_columns_and_is_for_users(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert ".py ──" not in shown
    assert "reading order" not in shown, "of the source"
    assert "(default: None)" not in shown


def test_an_unknown_option_is_told_with_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong, told in (
        (["run", "-n", "2", "train.py"], "fxdp run: error: unrecognized arguments: -n\n"),
        (["run", "--nprocs", "2", "train.py"], "fxdp run: error: unrecognized arguments: --nprocs\n"),
        (["run"], "fxdp run: error: the following arguments are required: script\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert shown.startswith("usage: fxdp run [--nproc N]")
        assert shown.endswith(told)


def test_words_between_colons_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "nothing:x"]) == 2
    assert capsys.readouterr().err.startswith("fxdp: error: nothing:x: cannot import nothing: ")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(MeshError):
        main(["demo", "--debug", "--mesh", "tp=2"])


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fxdp.cli.demo.demonstration.run_demo", interrupt)
    assert main(["demo"]) == 130


def test_every_fxdp_error_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> int:
        raise FxdpError("where [got] expected: remedy")

    monkeypatch.setattr("fxdp.cli.demo.demonstration.run_demo", fail)
    assert main(["demo", "--out", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == "fxdp: error: where [got] expected: remedy\n"
