"""Models that fix their batch size: fitted from static traces, exact at others, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

from fxdp.capture.captured import SizeLeaf
from fxdp.capture.joint.fit import fit_float, fit_int
from fxdp.capture.joint.static import size
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import ScalarType
from tests import lockstep
from tests.capture.oracle import check
from tests.capturing import capture

SIZES = (3, 5, 7, 11)


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor):
        n = int(x.shape[0])
        logits = self.norm(self.a(x)) @ self.a(y).T
        labels = torch.arange(n)
        spread = logits.var() / (n * n - n)
        return F.cross_entropy(logits, labels) + logits[n - 1].mean() + spread, logits, n * 2


@pytest.mark.parametrize("batch", [2, 4, 9])
def test_fitted_graph_equals_eager(batch: int) -> None:
    captured = check(Contrastive(), (torch.randn(batch, 5), torch.randn(batch, 5)))
    assert captured.static
    assert captured.leaves[-1] == SizeLeaf(2 * B)
    nodes = [node for node in captured.gm.graph.nodes if node.target is size]
    assert nodes
    assert all(isinstance(meta(node).type, ScalarType) for node in nodes)
    with pytest.raises(RuntimeError, match="symbolic"):
        size("4*B")


def test_len_stays_symbolic() -> None:
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.fc(x) @ self.fc(x).T
            return F.cross_entropy(logits, torch.arange(len(logits)))

    captured = check(Labels(), (torch.randn(4, 5),))
    assert not captured.static


def test_branch_on_the_batch_is_a_condition() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() if x.shape[0] > 4 else x.mean()

    captured = capture(Branch(), (torch.randn(8, 2),), {})
    (condition,) = captured.conditions
    assert condition.holds({B: 5})
    assert not condition.holds({B: 4})
    assert condition.location.code == "return x.sum() if x.shape[0] > 4 else x.mean()"
    (other,) = capture(Branch(), (torch.randn(8, 2),), {}, hint=3).conditions
    assert other.holds({B: 4})
    assert not other.holds({B: 5})


class _Compares(nn.Module):
    def __init__(self, question: Callable[[int], bool]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() if self.question(x.shape[0]) else x.mean()


@pytest.mark.parametrize("question", [lambda n: n == 512, lambda n: n != 512, lambda n: n < 512])
def test_a_question_about_any_size_is_a_condition(question: Callable[[int], bool]) -> None:
    conditions = capture(_Compares(question), (torch.randn(8, 2),), {}).conditions
    assert [all(c.holds({B: n}) for c in conditions) for n in (1, 2, 511, 512)] == [True, True, True, False]


class _Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = x.var(0).sum() if x.shape[0] > 1 else x.sum()
        return some + x.square().sum() / max(len(x) - 1, 1)


def test_a_question_about_one_sample_is_a_condition() -> None:
    """Torch traces sizes of at least 2, and leaves no guard for what it knows of these."""
    conditions = capture(_Asks(), (torch.randn(8, 2),), {}).conditions
    assert all(condition.holds({B: 2}) for condition in conditions)
    (one,) = (condition for condition in conditions if not condition.holds({B: 1}))
    assert one.location.code == "some = x.var(0).sum() if x.shape[0] > 1 else x.sum()"
    cached = capture(_Asks(), (torch.randn(8, 2),), {}).conditions
    assert cached == conditions


def test_a_squeeze_relies_on_more_than_one_sample() -> None:
    class Squeezes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x[:, :1].squeeze(1)  # of a size that is 1 for any batch
            return x.squeeze() * kept.sum()

    (condition,) = capture(Squeezes(), (torch.randn(8, 2),), {}).conditions
    assert condition.holds({B: 2})
    assert not condition.holds({B: 1})
    assert condition.location.code == "return x.squeeze() * kept.sum()"
    alone = capture(Squeezes(), (torch.randn(8, 2),), {}, couple=False)
    assert not alone.conditions, "one rank squeezes the global batch itself"


class _Sized(nn.Module):
    """Takes the batch size for a number, and computes another one of it."""

    def __init__(self, number: Callable[[int], float]) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum() * self.number(int(x.shape[0]))


@pytest.mark.parametrize("number", [lambda n: 1 + n % 2, lambda n: n // 2, lambda n: 2 if n == 5 else 1])
def test_a_number_without_a_formula_is_refused(number: Callable[[int], float]) -> None:
    with pytest.raises(CaptureError, match="in a way that has no formula"):
        capture(_Sized(number), (torch.randn(4, 2),), {})


@pytest.mark.parametrize("number", [lambda n: min(n, 16), lambda n: 2 if n > 16 else n])
def test_a_formula_holds_up_to_the_largest_traced_batch(number: Callable[[int], float]) -> None:
    x = torch.randn(4, 2)
    conditions = capture(_Sized(number), (x,), {}).conditions
    assert all(c.holds({B: 10}) for c in conditions)
    assert not all(c.holds({B: 11}) for c in conditions)
    assert all(c.holds({B: 12}) for c in capture(_Sized(number), (x,), {}, hint=12).conditions)
    with pytest.raises(CaptureError, match=r"in a way that has no formula .* at 20"):
        capture(_Sized(number), (x,), {}, hint=20)


def test_a_formula_is_tried_on_one_and_on_two_samples() -> None:
    x = torch.randn(4, 2)
    for number, most in ((lambda n: n - 1, 0), (lambda n: max(n - 1, 1), 1), (lambda n: max(n, 3), 2)):
        conditions = capture(_Sized(number), (x,), {}).conditions
        held = [size for size in (1, 2, 3, 4) if all(c.holds({B: size}) for c in conditions)]
        assert held == [*range(most + 1, 5)]


@pytest.mark.parametrize(
    ("function", "expr"),
    [
        (lambda b: 4 * b, 4 * B),
        (lambda b: b * b - b, B**2 - B),
        (lambda b: b - 1, B - 1),
        (lambda b: b * (b - 1) // 2, B**2 / 2 - B / 2),
    ],
)
def test_fit_int(function, expr: sympy.Expr) -> None:
    assert sympy.expand(fit_int(SIZES, [function(b) for b in SIZES]) - expr) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda b: 1 / b, lambda b: 2.0 / (b * 4 - 1), lambda b: 0.25 * b, lambda b: 1 / (b * b),
        lambda b: (b - 1) / b, lambda b: b**0.5, lambda b: (2 / (b - 1)) ** 0.5,
        math.log, lambda b: -2 * math.log(b - 1), lambda b: 0.5 * math.log(b), lambda b: math.log(7 / b),
    ],
)  # fmt: skip
def test_fit_float(function) -> None:
    expr = fit_float(SIZES, [function(b) for b in SIZES])
    assert float(expr.xreplace({B: sympy.Integer(9)})) == pytest.approx(function(9), rel=1e-15)


def test_what_does_not_fit() -> None:
    assert fit_int(SIZES, [2**b for b in SIZES]) is None
    assert fit_float(SIZES, [float(b) ** (1 / 3) for b in SIZES]) is None
    assert fit_float(SIZES, [math.lgamma(b) for b in SIZES]) is None


class _Listed(nn.Module):
    """Says something of each sample in a list, whose length Python has to know."""

    def __init__(self, number: Callable[[int], int]) -> None:
        super().__init__()
        self.fc, self.embedding, self.number = nn.Linear(4, 4), nn.Embedding(3, 4), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds = torch.tensor([[self.number(i), 2] for i in range(x.shape[0])])
        return (self.fc(x) * self.embedding(kinds).sum(1)).square().mean()


def test_a_list_of_the_same_number_for_each_sample() -> None:
    lockstep.check(_Listed(lambda _: 1), (torch.randn(7, 4),), splits=((4, 3), (5, 2, 0, 0)))


def test_a_list_of_other_numbers_for_each_sample_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"constant of shape \[\d+, 2\] depends on the batch"):
        capture(_Listed(lambda i: i % 2), (torch.randn(7, 4),), {})


class _Looped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row * torch.tensor([1, i]) for i, row in enumerate(x)]).sum()


def test_a_constant_for_each_sample_is_refused() -> None:
    with pytest.raises(CaptureError, match="how many tensor constants there are depends on the batch size"):
        capture(_Looped(), (torch.randn(7, 2, requires_grad=True),), {})
