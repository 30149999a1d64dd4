"""Statements that only raise become checks of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.capture.python.raise_checks import _conditions
from fxdp.errors import CaptureError, InputError
from tests.capturing import capture
from tests.lockstep import check


class Guarded(nn.Module):
    """Refuses large labels and negative or infinite inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None and labels.max() >= 5:
            raise ValueError("labels must be below 5")
        assert torch.all(x >= 0).item(), "x must not be negative"
        if not x.isfinite().all():
            raise ValueError("x must be finite")
        if x.max().item() > 100 or x.min() < -100:
            raise ValueError("x must be small")
        return self.fc(x).square().mean()


def _inputs(batch: int = 7) -> tuple[Tensor, Tensor]:
    return torch.rand(batch, 3), torch.randint(0, 5, (batch,))


def test_each_check_is_a_result_of_the_global_batch() -> None:
    captured = check(Guarded(), _inputs(), splits=((4, 3), (5, 2, 0, 0))).captured
    lines = [c.location.code.partition(" ")[0] for c in captured.checks]
    assert lines == ["if", "assert", "if", "if", "if"]
    assert [c.passes for c in captured.checks] == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (lambda x, y: (x, y + 5), "labels.max() >= 5"),
        (lambda x, y: (x - 1, y), "assert torch.all(x >= 0)"),
        (lambda x, y: (x / 0, y), "isfinite"),
        (lambda x, y: (x + 200, y), "x.max().item() > 100"),
    ],
)
def test_the_call_raises_where_the_model_would(broken: Any, line: str) -> None:
    model, inputs = Guarded(), _inputs()
    compiled = fxdp.compile(model, {"dp": 1}, backend="eager")
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-12, atol=0)
    with pytest.raises((ValueError, AssertionError)):
        model(*broken(*inputs))
    with pytest.raises(InputError, match="refuses this batch") as caught:
        compiled(*broken(*inputs))
    assert line in str(caught.value)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-12, atol=0)


def test_without_the_question_there_is_no_check() -> None:
    captured = capture(Guarded(), (torch.rand(4, 3),), {})
    assert len(captured.checks) == 4


class Gaussian(nn.Module):
    """torch's own loss refuses negative variances."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.gaussian_nll_loss(self.fc(x), x, x + 1)


def test_a_check_inside_of_a_library_function() -> None:
    captured = check(Gaussian(), (torch.rand(7, 3),), splits=((4, 3), (5, 2, 0, 0))).captured
    assert ["torch.any(var < 0)" in c.location.code for c in captured.checks] == [True]


class Asserted(nn.Module):
    """Lets the device raise, without waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x >= 0).all(), "x must not be negative")
        return self.fc(x).square().mean()


def test_an_assertion_of_the_device_raises() -> None:
    model, x = Asserted(), torch.rand(7, 3)
    check(model, (x,), splits=((4, 3), (5, 2, 0, 0)))
    compiled = fxdp.compile(model, {"dp": 1}, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(RuntimeError):
        model(x - 1)
    with pytest.raises(InputError, match="refuses this batch"):
        compiled(x - 1)


class Clamped(nn.Module):
    """Clamps what overflowed, as the layers of DETR do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if not torch.isfinite(y).all():
            y = y.clamp(-1e4, 1e4)
        if y.dtype == torch.float64 and torch.isnan(y).any().item():
            y = y.nan_to_num()
        return y.square().mean()


def test_a_branch_on_values_that_are_not_finite_is_a_check() -> None:
    """The program has the way of finite values; the other way is refused at the step that would go it."""
    model, x = Clamped().double(), torch.rand(7, 3, dtype=torch.float64)
    captured = check(model, (x,), splits=((4, 3), (5, 2, 0, 0))).captured
    assert [(c.passes, c.otherwise) for c in captured.checks] == [(True, "not finite"), (False, "not finite")]
    compiled = fxdp.compile(model, {"dp": 1}, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
    with pytest.raises(InputError, match=r"not finite.*\n.*test_raise_checks.py:\d+ `if not torch.isfinite"):
        compiled(x / 0)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        raise ValueError("negative")


def test_a_branch_with_work_in_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(Branching(), (torch.rand(4, 3),), {})
    assert capfd.readouterr() == ("", ""), "torch prints no graph"


def test_which_lines_only_raise(tmp_path: Any) -> None:
    source = """
assert a > 0                      # 2
if a.any() and not b.all():       # 3: its parts must differ
    raise ValueError
if not (a.any() or c):            # 5
    raise ValueError
if x is None or c.any():          # 7
    print()
    raise ValueError
if (
    a.max()                       # 11
    > 5
):
    raise ValueError
elif b:                           # 15
    pass
if not isfinite(a).all():         # 17
    b = clamp(a)
elif x and a.dtype == half and torch.any(a.isnan()).item():    # 19
    b = a
if isfinite(a).all(): b = bool(c)  # 21: the line asks for more than that
if isfinite(a).any() or a > 0:    # 22
    pass
"""
    file = tmp_path / "guarded.py"
    file.write_text(source)
    raising = {2: True, 5: True, 7: False, 11: False, 12: False}
    finite = {17: True, 19: False}
    assert _conditions(str(file)) == {
        **{line: (passes, True) for line, passes in raising.items()},
        **{line: (passes, False) for line, passes in finite.items()},
    }
