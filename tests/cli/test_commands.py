"""`fxdp verify`, `plan` and `explain`: what they print, and their exit codes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fxdp
from fxdp.cli import main

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x):
        scores = self.fc(x) @ self.fc(2 * x).t()
        return F.cross_entropy(scores, torch.arange(x.shape[0]))

import time
BEGIN = time.perf_counter()

class Changes(Pairs):
    def forward(self, x):
        return self.fc(x).mean() * (time.perf_counter() - BEGIN)

def pairs():
    return Pairs(), (torch.randn(8, 3),)

def changes():
    return Changes(), (torch.randn(8, 3),), {}

def trained():
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    return {"model": nn.Linear(3, 2), "args": (x,), "kwargs": {"target": y}, "loss_fn": F.cross_entropy}

def alone():
    return Pairs()

def swapped():
    return (torch.randn(8, 3),), Pairs()

def broken():
    raise RuntimeError("no data here")

number = 3
net = Pairs()
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("nets") / "nets_of_the_user.py"
    path.write_text(SOURCE)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_verify_shows_the_report(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "verify", f"{nets}:pairs", "--mesh", "dp=4")
    assert code == 0
    assert "Pairs on mesh(dp=4) equals one device" in out
    assert "[5, 2, 0, 1]" in out


def test_verify_with_a_loss_and_splits(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    splits = ("--split", "3,5", "--split", "8,0", "--seed", "3", "--rng", "single-device")
    code, found = run_json(capsys, "verify", f"{nets}:trained", "--mesh", "dp=2", *splits)
    assert code == 0
    assert [run["split"] for run in found["splits"]] == [[3, 5], [8, 0]]
    assert {row["result"] for row in found["splits"][0]["results"]} == {
        "output 0", "gradient of weight", "gradient of bias",
    }  # fmt: skip


def test_verify_of_what_is_not_equal_is_exit_code_1(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "verify", f"{nets}:changes", "--mesh", "dp=2", "--precision", "own")
    assert code == 1
    assert "Changes on mesh(dp=2) differs from one device" in out
    assert "gradient of fc.weight differs" in out


def test_plan_of_a_pipeline(nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "schedule.svg"
    asked = ("plan", f"{nets}:trained", "--mesh", "pp=1", "--microbatches", "3", "--svg", str(picture))
    code, out, _ = run(capsys, *asked, "--schedule", "gpipe", "--html", str(tmp_path / "plan.html"))
    assert code == 0
    assert "Linear on mesh(dp=1), a batch of 8" in (tmp_path / "plan.html").read_text()
    assert "rank 0: F0 F1 F2 B0 B0 B1 B1 B2 B2" in out
    assert "gpipe: 1 stages on 1 ranks, 3 micro-batches" in picture.read_text()
    code, found = run_json(capsys, *asked, "--stages", "1")
    assert [row["parameters"] for row in found["stages"]] == [8]
    assert found["schedule"] == ["rank 0: 0F0 0B0 0F1 0B1 0F2 0B2"]


def test_plan_names_stages_that_do_not_exist(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "plan", f"{nets}:trained", "--mesh", "pp=2", "--stages", "head")
    assert code != 0
    assert "no op of the forward is in a module 'head'" in error


def test_plan(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", f"{nets}:pairs", "--mesh", "dp_replicate=2,dp=32", "--text")
    assert code == 0
    assert "mesh(dp_replicate=2, dp=32)" in out
    assert "communication of one step" in out
    assert "what does not split over the ranks" in out
    assert "gradients: 80 B per step" in out


def test_plan_as_json(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "plan", f"{nets}:pairs", "--mesh", "dp=64")
    assert code == 0
    assert found["gradient_bytes"] == 80
    assert sum(row["bytes"] for row in found["communication"] if row["gradient"]) == 80
    assert "aten.mm" in {row["op"] for row in found["coverage"]["rows"]}
    assert "text" not in found


def test_explain_by_op_and_by_line(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{nets}:pairs", "aten.mm", "self.fc(x) @")
    assert code == 0
    assert "rule product_of_two (einsum), reads %" in out
    assert "nets_of_the_user.py:12  scores = self.fc(x) @ self.fc(2 * x).t()\n  %mm" in out
    assert out.count("nets_of_the_user.py:12") == 1, "nodes stand below their line"
    code, found = run_json(capsys, "explain", f"{nets}:pairs", "nets_of_the_user.py:13", "--mesh", "dp=4")
    assert code == 0
    assert {row["line"] for row in found} == {13}


def test_explain_collectives(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "explain", f"{nets}:pairs", "--collectives")
    assert code == 0
    assert all(row["collective"] for row in found)
    assert any("is P(sum), needed as R by gradient of fc.weight" in row["why"] for row in found)
    assert any("is S(1), needed as R by aten.mm" in row["why"] for row in found)


def test_explain_nothing_is_exit_code_1(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{nets}:pairs", "conv2d", "line 7")
    assert code == 1
    assert out == "no node of the program has conv2d and line 7 in its line\n"


def test_explain_names_what_is_near(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{nets}:pairs", "fc.wieght")
    assert code == 1
    assert "near it are fc.weight" in out


def test_places_are_whole_in_80_columns(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of values; other tables are in test_widths.py."""
    code, out, _ = run(capsys, "plan", f"{nets}:pairs", "--values")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "nets_of_the_user.py:12  scores = " in out
    assert "<unknown>" not in out
    _, out, _ = run(capsys, "plan", f"{nets}:trained")
    assert ".py:" in out.partition("  def trained():")[0], "torch's layers and losses are of the factory"


def test_rank_0_alone_prints(
    nets: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert run(capsys, "plan", f"{nets}:pairs") == (0, "", "")
    assert run(capsys, "explain", f"{nets}:pairs", "--json") == (0, "", "")


def test_a_plan_from_the_command_line_is_read_in_python(
    nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "plan", f"{nets}:pairs", "--json")
    plan = fxdp.Plan.from_json(out)
    assert repr(plan).startswith("Plan(Pairs on mesh(dp=2), a batch of 16: 4 messages")
    assert plan.explain("fc.weight").parameters


def test_a_plan_beside_one_that_was_written(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "plan.json"
    written.write_text(run(capsys, "plan", f"{nets}:pairs", "--json")[1])
    assert run(capsys, "plan", f"{nets}:pairs", "--diff", str(written)) == (0, "the plans are alike\n", "")
    _, out, _ = run(capsys, "plan", f"{nets}:trained", "--mesh", "dp=4", "--diff", str(written))
    assert out.startswith("model: Linear here, Pairs there\nmesh: dp=4 here, dp=2 there\n")
    assert max(map(len, out.splitlines())) <= 80
    assert {"what": "mesh", "here": "dp=4", "there": "dp=2"} in run_json(
        capsys, "plan", f"{nets}:pairs", "--mesh", "dp=4", "--diff", str(written)
    )[1]


def test_help_teaches_what_a_factory_may_return(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    names = set(inspect.signature(fxdp.compile).parameters) - {"model", "mesh", "unknown"}
    assert all(f"\n  {name} " in shown for name in names)
    assert "axis  is  dp (data), pp (pipeline stages)" in shown


def test_options_without_effect_are_told(
    nets: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(capsys, "plan", f"{nets}:pairs", "--mesh", "dp=2", "--stages", "2")[0] == 0
    assert any("fxdp.Pipeline(stages=2): without effect, as the mesh" in said for said in caplog.messages)


MISTAKES = [
    (["plan", "nets"], "nets: expected module:factory"),
    (["plan", "no_such_module_of_mine:make"], "cannot import no_such_module_of_mine: ModuleNotFoundError"),
    (["plan", "/no/such/file.py:make"], "there is no file /no/such/file.py"),
    (
        ["plan", "{nets}:nope"],
        "has no 'nope'; its functions are alone, broken, changes, pairs, swapped, trained",
    ),
    (["plan", "{nets}:number"], "number is an int, expected a function without arguments"),
    (
        ["plan", "{nets}:net"],
        "net is a Pairs, expected a function without arguments that returns a model and",
    ),
    (["plan", "torch.version:none"], "torch.version has no 'none'; its functions are none"),
    (["plan", "{nets}:alone"], "returned a Pairs, expected (model, args)"),
    (["plan", "{nets}:swapped"], "returned (tuple, Pairs), expected (model, args)"),
    (["plan", "{nets}:broken"], "raised RuntimeError: no data here. --debug shows where"),
    (["plan", "{nets}:pairs", "--mesh", "dp"], "--mesh dp: got 'dp', expected axis=size"),
    (["plan", "{nets}:pairs", "--mesh", "dp=2,dp=2"], "once per axis"),
    (["plan", "{nets}:pairs", "--mesh", "2x4"], "--mesh pp=2,dp=8    --mesh dp_replicate=2,dp_shard=8"),
    (
        ["plan", "{nets}:trained", "--mesh", "pp=1", "--microbatches", "2", "--svg", "/no/such/x.svg"],
        "cannot write /no/such/x.svg: No such file or directory",
    ),
    (["plan", "{nets}:pairs", "--html", "/no/such/x.html"], "cannot write /no/such/x.html: No such file or"),
    (["plan", "{nets}:pairs", "--svg", "/proc"], "cannot write /proc: Is a directory. Name another file"),
    (["plan", "{nets}:pairs", "--diff", "/no/such.json"], "--diff /no/such.json: No such file or directory."),
    (["plan", "{nets}:pairs", "--diff", "{nets}"], "this is no JSON"),
    (["plan", "{nets}:pairs", "--mesh", "tp=2"], "'tp'"),
    (["verify", "{nets}:pairs", "--split", "3;5"], "--split 3;5: expected the samples of each rank"),
    (["verify", "{nets}:pairs", "--split", "3,5"], "each of 4 parts"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *[word.format(nets=nets) for word in arguments])
    assert (code, out) == (2, "")
    assert err.startswith("fxdp: error: ")
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_users_own_error(nets: str) -> None:
    with pytest.raises(Exception, match="no data here") as caught:
        main(["plan", f"{nets}:broken", "--debug"])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "fxdp", "rules"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 1


def test_a_script_with_a_setting_that_cannot_be_read_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: only compiling read it, was refused, and all ran op by op."""
    monkeypatch.setenv("FXDP_CACHE", "off")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert main(["run", str(tmp_path / "train.py")]) == 2
    assert "FXDP_CACHE is 'off'; expected a number" in capsys.readouterr().err
