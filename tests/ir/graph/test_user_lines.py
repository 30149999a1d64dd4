"""An error of fxdp shows the user's lines, and not the hundreds of lines of a trace."""

from __future__ import annotations

import logging
import traceback

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import FxdpError, VerifierError
from fxdp.ir.graph.user_lines import show_user_lines


class Decides(nn.Module):
    """Asks for the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.fc(x)  # type: ignore[no-any-return]


def shown(error: BaseException) -> list[tuple[str, str]]:
    return [(frame.filename, frame.line or "") for frame in traceback.extract_tb(error.__traceback__)]


def test_a_call_that_cannot_be_captured_shows_its_own_lines_and_the_models() -> None:
    compiled = fxdp.compile(Decides(), backend="eager")
    with pytest.raises(fxdp.CaptureError) as raised:
        compiled(torch.randn(4, 4))
    lines = shown(raised.value)
    assert lines[0][1] == "compiled(torch.randn(4, 4))"
    assert sum("/torch/" in file for file, _ in lines) <= 2, "of the call of a module alone"
    assert sum("/fxdp/" in file and "/tests/" not in file for file, _ in lines) <= 1, lines
    assert raised.value.__cause__ is not None
    assert [line for _, line in shown(raised.value.__cause__)] == ["if x.sum() > 0:"]


def test_wrong_sizes_are_told_in_a_few_lines() -> None:
    compiled = fxdp.compile(nn.Sequential(nn.Linear(4, 2)), backend="eager")
    with pytest.raises(fxdp.CaptureError, match="cannot be multiplied") as raised:
        compiled(torch.randn(4, 3))
    assert len("".join(traceback.format_exception(raised.value)).splitlines()) < 30


def test_an_error_of_fxdps_own_keeps_its_lines() -> None:
    def deep(error: Exception) -> None:
        exec(compile("raise error", "inner.py", "exec"), {"__name__": "fxdp.inner", "error": error})

    for kind, kept in ((FxdpError, 0), (VerifierError, 1)):
        with pytest.raises(kind) as raised:
            deep(kind("x"))
        show_user_lines(raised.value)
        assert sum(file == "inner.py" for file, _ in shown(raised.value)) == kept, kind


def test_all_lines_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fxdp"), pytest.raises(fxdp.CaptureError):
        fxdp.plan(Decides(), (torch.randn(4, 4),), mesh={"dp": 2})
    assert any("left out" in record.message for record in caplog.records)
    assert "torch/export" in caplog.text
