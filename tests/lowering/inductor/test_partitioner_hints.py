"""What a backward reads on CPU: numbers rather than masks, and weights as convolutions want them.

Whatever the partitioner recomputes, the backward uses the numbers that the forward drew.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxdp
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.lowering.inductor.compile import _Compiler
from fxdp.lowering.inductor.partitioner_hints import compute_where_operands_are

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

aten = torch.ops.aten


class Pooled(nn.Module):
    """A convolution whose relu is read by a mean alone, so that its backward needs the signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.second(F.relu(self.first(x))))
        return y.mean((2, 3)).square().sum()


class Signs(nn.Module):
    """Compares a buffer that the same step overwrites, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("running", torch.tensor([1.0, -1, 1, -1, 1, -1]))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(self.running > 0, self.linear(x), 0.0)
        self.running.neg_()
        return F.dropout(y, 0.5, self.training).square().sum()


class Softplus(nn.Module):
    """The partitioner saves what `y > 20` is, and computes y a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w + self.b
        return (F.softplus(y) * y.exp()).sum()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[ForwardBackward]:
    """The halves that Inductor compiles."""
    found: list[ForwardBackward] = []

    def training(self: _Compiler, *args: Any) -> ForwardBackward:
        found.append(original(self, *args))
        return found[-1]

    original = _Compiler.training
    monkeypatch.setattr(_Compiler, "training", training)
    return found


def _step(model: nn.Module, x: Tensor, rng: Any = "sharded") -> list[Tensor | None]:
    """The gradients of one compiled training step."""
    compiled: Any = fxdp.compile(model, rng=rng)
    compiled(x).backward()
    return [p.grad for p in compiled.parameters()]


def _eager(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model(x).backward()
    return [p.grad for p in model.parameters()]


def _read(pair: ForwardBackward) -> list[Tensor]:
    """What the backward takes."""
    assert pair.backward_graph is not None
    found = [n.meta["val"] for n in pair.backward_graph.graph.find_nodes(op="placeholder")]
    return [value for value in found if isinstance(value, Tensor)]


def test_values_are_saved_instead_of_signs_and_no_copy_of_weights(lowered: list[ForwardBackward]) -> None:
    """Weights are read where they lie; for their own gradients, which read none, with other strides."""
    model, x = Pooled().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    gradients = _step(copy.deepcopy(model), x)
    (pair,) = lowered
    assert not any(value.dtype == torch.bool for value in _read(pair))
    torch.testing.assert_close(gradients, _eager(model, x), rtol=1e-12, atol=1e-12)
    assert pair.backward_graph is not None
    calls = pair.backward_graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    weights = [call.args[2].meta["val"] for call in calls]
    assert [value.stride(1) for value in weights] == [9, 1]  # the first convolution's input has no gradient
    taken = {value.untyped_storage()._cdata for value in _read(pair)}
    assert all(value.untyped_storage()._cdata in taken for value in weights)


def test_a_buffer_is_compared_before_it_is_overwritten() -> None:
    model, x = Signs().double().eval(), torch.randn(3, 6, dtype=torch.float64)
    gradients = _step(copy.deepcopy(model), x)
    torch.testing.assert_close(gradients, _eager(model, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rng", ["sharded", "single-device"])
def test_compared_values_are_not_computed_a_second_time(rng: Any) -> None:
    model, x = Softplus().double(), torch.randn(3, 6, dtype=torch.float64)
    gradients = _step(copy.deepcopy(model), x, rng)
    torch.testing.assert_close(gradients, _eager(model, x), rtol=1e-12, atol=1e-12)


def test_half_precision_keeps_what_it_did_not_drop() -> None:
    """Where a number is rounded to the probability, the backward must not decide anew."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(50000)), nn.Parameter(torch.ones(50000))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first = F.dropout((x * self.first).bfloat16(), 0.3).float()
            second = F.dropout((x * self.second).half(), 0.3).float()
            return first.sum() + second.sum(), first, second

    model = Half()
    loss, first, second = fxdp.compile(model)(torch.ones(1, 50000))
    loss.backward()
    for weight, kept in ((model.first, first), (model.second, second)):
        assert weight.grad is not None
        assert torch.equal(weight.grad != 0, kept[0] != 0)


def test_drawn_numbers_are_not_saved_for_their_masks(lowered: list[ForwardBackward]) -> None:
    _step(Signs(), torch.randn(3, 6))
    (pair,) = lowered
    masks = [value for value in _read(pair) if value.dtype == torch.bool and value.shape == (3, 6)]
    assert len(masks) == 1


class Dropped(nn.Module):
    """Dropout as it is and inside of a checkpoint; returns what shows the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(40))
        self.v = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = F.dropout(x * self.w, 0.5)
        again = checkpoint(lambda y: F.dropout(y * self.v, 0.5).sin(), first.cos(), use_reentrant=False)
        return first.sum() + again.sum(), first, again


def gradients(first: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradients are if the backward used the masks of the forward."""
    one, two, inner = (first != 0) * 2.0, (again != 0) * 2.0, first.cos()
    slope = (two * inner).cos() * two
    return (one * (1 - slope * first.sin())).sum(0), (slope * inner).sum(0)


@pytest.mark.parametrize("rng", ["sharded", "single-device"])
def test_the_backward_repeats_the_masks(rng: str) -> None:
    model, x = Dropped().double(), torch.ones(6, 40, dtype=torch.float64)
    with torch._functorch.config.patch(activation_memory_budget=0.0):  # everything is recomputed
        compiled = fxdp.compile(model, rng=rng)
        torch.manual_seed(3)
        loss, first, again = compiled(x)
        loss.backward()
    for parameter, expected in zip(model.parameters(), gradients(first, again), strict=True):
        torch.testing.assert_close(parameter.grad, expected.detach(), rtol=1e-12, atol=1e-12)
    if rng == "single-device":
        torch.manual_seed(3)
        for value, expected in zip((first, again), model(x)[1:], strict=True):
            assert torch.equal(value, expected), "eager's own numbers"


class Unread(nn.Module):
    """Draws last what it throws away."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x)
        F.dropout(y.sin())
        return y


def test_a_draw_that_nobody_reads_is_made() -> None:
    model, x = Unread(), torch.ones(6, 40, requires_grad=True)
    compiled = fxdp.compile(model, rng="single-device")
    found = []
    for step in (compiled, model):
        torch.manual_seed(3)
        found.append([step(x) for _ in range(2)])
    assert all(map(torch.equal, *found))
    found[0][1].sum().backward()
    assert torch.equal(x.grad, found[0][1].detach()), "the masks of the forward"


def test_a_smaller_budget_saves_less_and_gives_the_same_gradients() -> None:
    layers = [m for _ in range(2) for m in (nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 8))]
    model, x = nn.Sequential(*layers).double(), torch.randn(32, 8, dtype=torch.float64)
    saved, gradients = [], []
    for budget in (1.0, 0.3):
        compiled = fxdp.compile(
            model, loss_fn=lambda y, _: y.square().mean(), activation_checkpointing=budget
        )
        torch.manual_seed(0)
        loss = compiled(x, target=x)
        assert loss.grad_fn is not None
        kept: Any = loss.grad_fn
        saved.append(sum(t.numel() * t.itemsize for t in kept.saved_tensors if t is not None))
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert saved[1] < 0.7 * saved[0]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_what_is_saved_alone_is_computed_where_its_operands_are() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.sin.default, (x,))
    second = graph.call_function(aten.cos.default, (first,))
    loss = graph.call_function(aten.sum.default, (second,))
    kept = graph.call_function(aten.neg.default, (first,))
    of_both = graph.call_function(aten.mul.Tensor, (kept, first))
    drawn = graph.call_function(aten.rand_like.default, (first,))
    of_input = graph.call_function(aten.abs.default, (x,))
    graph.output((loss, kept, of_both, drawn, of_input))
    compute_where_operands_are(fx.GraphModule(nn.Module(), graph), 1)
    graph.lint()
    calls = [n for n in graph.nodes if n.op == "call_function"]
    assert calls == [first, kept, of_both, second, loss, drawn, of_input]
