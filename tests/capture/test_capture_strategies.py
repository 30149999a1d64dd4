"""Strategies of capture: their order, a model that needs each, and the reasons for leaving the others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.capture.attempt import CaptureAttempt, Made, NothingFitsError
from fxdp.capture.capture_strategies import STATIC_TRACES, STRATEGIES, TRACES, Strategy, first_that_works
from fxdp.errors import CaptureError, InputError
from tests.capture.export.test_rewrites import Pictures
from tests.capture.patches.test_unbacked_hints import Pooled, Sized
from tests.capturing import capture


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("kept", torch.tensor(2))


class Plain(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean()


class Flag(Base):
    """Whether all are so is taken for false, and that way fails; after that the same once more."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x if (x > -100).all() else x[:, :3])
        return self.fc(y if (y > -100).all() else y[:, :3]).mean()


class Constant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sum() / int(x.shape[0])


class Loop(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row).softmax(0) for row in x]).square().mean()


class Kept(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, : int(self.kept)].mean()


class KeptFlag(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)[:, : int(self.kept)]
        return y.mean() if (x > -100).all() else self.fc(y).mean()


class KeptConstant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, : int(self.kept)].sum() / int(x.shape[0])


class KeptLoop(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row)[: int(self.kept)].softmax(0) for row in x]).square().mean()


class KeptAndRead(Base):
    """Reads a buffer and the data: with another value in the buffer it is captured anew."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x)[:, : int(self.kept)].sum() + self.fc(x).sum()) / int((x > -100).sum())


class Branch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean() if x.sum() > 0 else -self.fc(x).mean()


class Numbered(Base):
    """A loop whose iterations differ."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row).mean() / (1 + i * i) for i, row in enumerate(x)]).mean()


X = torch.randn(8, 4, dtype=torch.float64)
ROWS = torch.randn(8, 3, 4, dtype=torch.float64)
PICTURES = torch.randn(8, 2, 3, dtype=torch.float64)
ONES = torch.ones(8, dtype=torch.long)
MADE: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "symbolic": (Plain, (X,)),
    "other branch": (Flag, (X,)),
    "static traces": (Constant, (X,)),
    "merged loops": (Loop, (X,)),
    "uneven static traces": (Pictures, (PICTURES, ONES)),
    "buffers as numbers, symbolic": (Kept, (X,)),
    "buffers as numbers, other branch": (KeptFlag, (X,)),
    "buffers as numbers, static traces": (KeptConstant, (X,)),
    "buffers as numbers, merged loops": (KeptLoop, (X,)),
    "hinted numbers, static traces": (Pooled, (ROWS, torch.ones(8, 3, dtype=torch.long))),
    "hinted numbers, merged loops": (Sized, (ROWS.new_ones(8, 5, 6), torch.tensor([(3, 2)] * 8))),
}


def test_their_order() -> None:
    assert [strategy.name for strategy in STRATEGIES] == [
        "symbolic",
        "other branch",
        "static traces",
        "merged loops",
        "uneven static traces",
        "buffers as numbers",
        "hinted numbers",
    ]
    assert STRATEGIES[: len(TRACES)] == TRACES
    assert TRACES[-len(STATIC_TRACES) :] == STATIC_TRACES


def test_each_has_a_model() -> None:
    needed = {name for made in MADE for name in made.split(", ")}
    assert needed == {strategy.name for strategy in STRATEGIES}


@pytest.mark.parametrize("made", MADE)
def test_a_model_that_needs_it(made: str) -> None:
    model, inputs = MADE[made]
    found = capture(model(), inputs, {})
    assert found.strategy == made
    assert found.numbers == (("kept",) if made.startswith("buffers") else ())
    tried = [one.name for one in found.left if one.tried]
    assert tried[:1] == (["symbolic"] if made != "symbolic" else [])
    assert all(one.reason for one in found.left)


def test_a_second_wrong_guess() -> None:
    found = capture(Flag(), (X,), {})
    assert [str(one).partition(": ")[0] for one in found.left] == ["symbolic", "other branch"]
    assert found.branches == (True, True)
    first, second = (one.reason.partition("`")[2].partition("`")[0] for one in found.left)
    assert first.startswith("y = self.fc(x if")
    assert second.startswith("return self.fc(y if")


def test_a_number_of_a_buffer_is_a_hint_too() -> None:
    found = capture(KeptAndRead(), (X,), {})
    assert found.strategy == "hinted numbers, static traces"
    assert found.numbers == ("kept",)


def test_why_one_was_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxdp"):
        found = capture(Loop(), (X,), {})
    assert found.reasons()[0] == "captured by merged loops, after"
    symbolic, static = found.reasons()[1:]
    assert symbolic == "  symbolic: the Python code makes the batch size a constant"
    assert static.startswith("  static traces: the number of operations depends on the batch size (")
    assert "\n".join(found.reasons()) in caplog.text
    other = found.reasons(every=True)[2]
    assert other.startswith("  other branch: not tried, it is for code that fails after a branch")
    assert capture(Plain(), (X,), {}).reasons(every=True) == ()


def test_the_plan_says_so() -> None:
    plan = fxdp.plan(Loop(), (X,), mesh={"dp": 2})
    assert plan.capture[0] == "captured by merged loops, after"
    assert "captured by merged loops, after\n  symbolic: the Python code makes" in str(plan)
    assert len(plan.capture) == 3
    assert len(fxdp.plan(Loop(), (X,), mesh={"dp": 2}, strict=True).capture) == 4
    assert fxdp.Plan.from_json(plan.to_json()).capture == plan.capture
    assert fxdp.plan(Plain(), (X,), mesh={"dp": 2}).capture == ()


def test_an_error_says_what_was_tried() -> None:
    with pytest.raises(CaptureError, match="treats its batch size as a Python constant") as caught:
        capture(Numbered(), (X,), {})
    refusal, _, tried = str(caught.value).partition("\ntried in this order:\n")
    assert "test_capture_strategies.py" in refusal
    assert "Write it with tensor operations over the batch dim" in refusal
    names = [line.strip().partition(": ")[0] for line in tried.splitlines()]
    assert names == ["symbolic", "static traces", "merged loops", "uneven static traces"]
    assert "test_capture_strategies.py" in tried.splitlines()[-1]


def test_what_was_tried_alone_is_the_error_itself() -> None:
    with pytest.raises(CaptureError, match="data-dependent control flow") as caught:
        capture(Branch(), (X,), {})
    assert "tried in this order" not in str(caught.value)


def test_strict_lists_what_was_not_tried() -> None:
    with pytest.raises(CaptureError, match="data-dependent control flow") as caught:
        fxdp.plan(Branch(), (X,), mesh={"dp": 2}, strict=True)
    tried = str(caught.value).partition("\ntried in this order:\n")[2].splitlines()
    assert [line.strip().partition(": ")[0] for line in tried] == [one.name for one in STRATEGIES]
    assert "test_capture_strategies.py" in tried[0]
    assert all("not tried, it is for " in line for line in tried[1:])


def _attempt() -> CaptureAttempt:
    return CaptureAttempt(tracer=None, hint=7)  # type: ignore[arg-type]  # strategies of these tests trace nothing


def _failing(name: str, error: Exception, **how: bool) -> Strategy:
    def run(_: CaptureAttempt) -> Made:
        raise error

    return Strategy(name, "tests", lambda _: True, run, **how)


def test_every_failure_is_kept() -> None:
    errors = [ValueError("one"), RuntimeError("two"), CaptureError("three")]
    strategies = [
        _failing("a", errors[0]),
        Strategy("never", "nothing", lambda _: False, lambda _: pytest.fail("it does not apply")),
        _failing("b", errors[1], reported=False),
        _failing("c", errors[2], reported=False),
    ]
    attempt = _attempt()
    with pytest.raises(NothingFitsError) as caught:
        first_that_works(strategies, attempt)
    assert [failure.error for failure in attempt.failures] == errors
    assert attempt.error is errors[0], "what an attempt at more fails with is not reported"
    assert [(one.name, one.tried) for one in caught.value.left] == [
        ("a", True), ("never", False), ("b", True), ("c", True),
    ]  # fmt: skip
    assert str(caught.value.left[1]) == "never: not tried, it is for nothing"


@pytest.mark.parametrize("error", [CaptureError("no"), InputError("no")])
def test_a_refusal_ends_the_capture(error: Exception) -> None:
    second = Strategy("b", "tests", lambda _: True, lambda _: pytest.fail("the first was a refusal"))
    with pytest.raises(type(error), match="no"):
        first_that_works([_failing("a", error), second], _attempt())
