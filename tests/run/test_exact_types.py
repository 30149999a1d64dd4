"""What a script asks of the exact type of a tensor is told by line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fxdp.run.exact_types import tell_of_exact_types

_TEXT = """
import torch
from torch import Tensor, nn
def own(x, Tensors):
    if type(x) is torch.Tensor: pass           # told
    if x.__class__ == Tensor: pass             # told
    if type(x) not in (list, Tensor): pass     # told
    if isinstance(x, Tensor): pass
    if type(x) is nn.Parameter or type(x) is dict or type(Tensors) == Tensors: pass
    if type("X", (), {}) is Tensor or x is Tensor: pass
"""


def test_lines_of_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (("types_of_mine", _TEXT), ("broken", "type(x) is Tensor ("), ("fine", "x = 1")):
        made = ModuleType(name)
        made.__file__ = str(tmp_path / f"{name}.py")
        Path(made.__file__).write_text(text)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr("fxdp.run.exact_types.is_own_file", lambda file: file.startswith(str(tmp_path)))
    tell_of_exact_types.__wrapped__()
    (said,) = caplog.messages
    assert said.startswith(", ".join(f"{tmp_path}/types_of_mine.py:{line}" for line in (5, 6, 7)) + " ask ")
    assert "Expected isinstance(x, torch.Tensor)" in said
