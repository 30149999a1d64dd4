"""The table of decisions, and the checked-in file that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxdp.rules
from fxdp.cli import main
from fxdp.rules.op_table import counts, markdown, rule_rows, without_rule
from fxdp.rules.registry import registry
from fxdp.torch_compat import torch_release

FILE = Path(fxdp.rules.__file__).parent / "TABLE.md"


def test_each_op_has_its_row() -> None:
    rows = rule_rows()
    assert len(rows) == len(registry.targets()) == sum(counts(rows).values())
    found = {row.op: (row.family, row.kind) for row in rows}
    assert found["mm"] == ("einsum", "contracted")
    assert found["convolution"] == ("convolution", "batched")
    assert found["nonzero"] == ("selection", "batched")


def test_the_file_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown == markdown(rule_rows())
    if f"with torch {torch_release()};" not in FILE.read_text():
        pytest.skip("the file was made with another torch, which has other ops")
    assert FILE.read_text() == shown, "run `fxdp rules --markdown > fxdp/rules/TABLE.md`"


def test_a_word_picks_ops_and_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "bernoulli"]) == 0
    assert "bernoulli.p" in capsys.readouterr().out
    assert {row.family for row in rule_rows("fourier")} == {"fourier"}


def test_a_word_that_nothing_has_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "no_such_op"]) == 2
    assert "rules no_such_op: no op or family has this in its name." in capsys.readouterr().err


def test_ops_without_a_rule_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    missing = without_rule()
    assert not {row.op for row in rule_rows()} & {*missing}
    assert {"_foreach_mm", "_nested_from_padded"} & {*missing}
    assert not {"mm", "add_.Tensor", "add.out", "linear"} & {*missing}
    assert main(["rules", "--missing"]) == 0
    assert tuple(capsys.readouterr().out.split()) == missing
    assert main(["rules"]) == 0
    assert f"{len(missing)} ops of the installed torch have no rule" in capsys.readouterr().out
