"""What `plan`, `explain`, `verify` and `rules` print at 80 and at 120 columns: nothing is cut or sliced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from fxdp.cli import main
from tests.cli.test_commands import SOURCE

WIDTHS = (80, 120)
_BOXES = str.maketrans("┏┳┓┡╇┩└┴┘━─┃│", "+++++++++--||")
"""expecttest writes ASCII alone."""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "nets_of_the_user.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return "nets_of_the_user.py:pairs"


def _printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, *words: str
) -> str:
    """The output of a command, without times, rounding and the folder of the test."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(list(words)) == 0
    shown = re.sub(r"capture .*", "capture TIME", capsys.readouterr().out)
    shown = re.sub(r"[\d.]+e[+-]\d\d │ \w+ +│", "N.Ne-NN │ NODE  │", shown)
    shown = re.sub(r"[\d.]+e[+-]\d\d$", "N.Ne-NN", shown, flags=re.MULTILINE)
    wide = [line for line in shown.splitlines() if len(line) > width]
    assert all(str(Path.cwd()) in line or "is compared with" in line for line in wide), "a path is not broken"
    return re.sub(r" +$", "", shown, flags=re.MULTILINE).translate(_BOXES)


def test_plan(nets: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (_printed(capsys, monkeypatch, width, "plan", nets) for width in WIDTHS)
    assert_expected_inline(
        narrow,
        """\
Pairs on mesh(dp=2), a batch of 16: 4 messages, 600 B in a step

communication of one step, by line

nets_of_the_user.py:12  scores = self.fc(x) @ self.fc(2 * x).t()
  forward   all_gather                192 B  aten.mm in fc
  forward   all_gather                320 B  aten.mm
  backward  all_reduce                 20 B  gradient of fc.bias
  backward  all_reduce                 60 B  gradient of fc.weight
nets_of_the_user.py:13  return F.cross_entropy(scores, torch.arange(x.shape[0]))
  forward   all_reduce        x2        8 B  aten.div.Tensor

total: 2 all_gather, 2 all_reduce; 512 B by gloo, 88 B by messages
gradients: 80 B per step

what does not split over the ranks
nets_of_the_user.py:12
  aten.mm: gathered, backward, 192 B
    pairs every sample with every other, so one side must be entire
    to do: nothing, if that is meant, as in a contrastive loss: the smaller side
    travels; else multiply per sample (bmm)
nets_of_the_user.py:12
  aten.mm: gathered, forward, 320 B
    pairs every sample with every other, so one side must be entire
    to do: nothing, if that is meant, as in a contrastive loss: the smaller side
    travels; else multiply per sample (bmm)

memory of rank 0: at most 2.6 KiB at _log_softmax_backward_data (backward):
  parameters 80 B, optimizer state 160 B, saved activations 1.1 KiB, temporary
  values 1.2 KiB, inputs 96 B
capture TIME
""",
    )
    assert_expected_inline(
        "".join(_other_lines(narrow, wide)),
        """\
    to do: nothing, if that is meant, as in a contrastive loss: the smaller side travels; else multiply per sample (bmm)
    to do: nothing, if that is meant, as in a contrastive loss: the smaller side travels; else multiply per sample (bmm)
memory of rank 0: at most 2.6 KiB at _log_softmax_backward_data (backward): parameters 80 B, optimizer state 160 B,
  saved activations 1.1 KiB, temporary values 1.2 KiB, inputs 96 B
""",  # noqa: E501
    )


def test_explain(nets: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter, from its line on: what is above names the folder."""
    narrow, wide = (_printed(capsys, monkeypatch, width, "explain", nets, "fc.bias") for width in WIDTHS)
    assert_expected_inline(
        _from_line_on(narrow),
        """\
nets_of_the_user.py:12  scores = self.fc(x) @ self.fc(2 * x).t()
  %fc_bias: f32[5] {dp=R} = param(fc.bias)
      given so: R for input, in fc
  %add: f32[5] {dp=P(sum)} = aten.add.Tensor(%view, %view_1)
      rule pointwise (pointwise), reads %view as P(sum), %view_1 as P(sum)
""",
    )
    assert _from_line_on(wide) == _from_line_on(narrow)


def test_verify(nets: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table; the sentence below is text, which is not wrapped in a pipe."""
    narrow, wide = (_printed(capsys, monkeypatch, width, "verify", nets) for width in WIDTHS)
    assert_expected_inline(
        narrow,
        """\
Pairs on mesh(dp=4) equals one device: largest relative error N.Ne-NN
+--------------+-------+---------+---------------+-------+-------+
| split        | nodes | results | largest error | at    |       |
+--------------+-------+---------+---------------+-------+-------+
| [2, 2, 2, 2] |    60 |       3 |       N.Ne-NN | NODE  | equal |
| [5, 2, 0, 1] |    60 |       3 |       N.Ne-NN | NODE  | equal |
| [0, 0, 0, 8] |    60 |       3 |       N.Ne-NN | NODE  | equal |
+--------------+-------+---------+---------------+-------+-------+
  in float64; every node, output, gradient and buffer is compared with one eager device
""",
    )
    assert wide == narrow


def test_rules(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (_printed(capsys, monkeypatch, width, "rules", "aten.lgamma") for width in WIDTHS)
    assert_expected_inline(
        narrow,
        """\
op rules
+----------+-----------+---------+
| op       | family    | kind    |
+----------+-----------+---------+
| lgamma   | pointwise | batched |
| mvlgamma | pointwise | batched |
+----------+-----------+---------+
2 ops: 2 batched, 0 contracted, 0 gathered
""",
    )
    assert wide == narrow


def _other_lines(narrow: str, wide: str) -> list[str]:
    """The lines that are only in the second text."""
    return [line for line in wide.splitlines(keepends=True) if line not in narrow.splitlines(keepends=True)]


def _from_line_on(shown: str) -> str:
    return shown[shown.index("\nnets_of_the_user.py:") + 1 :]
