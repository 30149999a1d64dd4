"""A model that is typed at a prompt, of Python or of IPython, is the user's code as one in a file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxdp

_SOURCE = """
import random
import torch

class Draws(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()

class Decides(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x
"""


def _typed(name: str, file: str) -> nn.Module:
    scope = {"__name__": "__main__"}
    exec(compile(_SOURCE, file, "exec"), scope)
    return scope[name](4, 4)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("file", ["model.py", "<stdin>", "<ipython-input-3-1a2b>", "<python-input-4>"])
def test_what_no_graph_can_hold_is_refused_with_its_line(file: str) -> None:
    for name, line, said in (("Draws", 7, "random.random draws"), ("Decides", 11, "data-dependent control")):
        compiled = fxdp.compile(_typed(name, file), backend="eager")
        with pytest.raises(fxdp.CaptureError, match=said) as raised:
            compiled(torch.ones(2, 4))
        assert str(raised.value).startswith(f"at {file}:{line}")


def test_draws_of_code_that_is_executed_as_text_are_refused() -> None:
    """By `python -c`, or by `exec` of a text."""
    compiled = fxdp.compile(_typed("Draws", "<string>"), backend="eager")
    with pytest.raises(fxdp.CaptureError, match=r"at <string>:7.*random\.random draws"):
        compiled(torch.ones(2, 4))
