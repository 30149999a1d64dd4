"""Backwards that are the model's own: `autograd.Function`s and hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxdp.errors import CaptureError
from tests.exactness.cases import Model, exact, exact_body, linear, rows
from tests.lockstep import check


class _Sign(torch.autograd.Function):
    """A straight-through estimator: the derivative of what torch sees is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x.abs() > 1] = 0
        return grad


class _Reversed(torch.autograd.Function):
    """A view, and a number that the backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class _Mean(torch.autograd.Function):
    """Couples the samples, takes their count, and returns more than tensors; half the true gradient."""

    @staticmethod
    def forward(x: Tensor, count: int) -> tuple[Tensor, Tensor, None, str]:
        return x.sum(0) / count, (x > 0).sum(0), None, "mean"

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.count = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        return grad.expand(ctx.count, grad.shape[0]) / (2 * ctx.count), None


class _Normalized(torch.autograd.Function):
    """BatchNorm by hand; its backward reduces over the batch again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        spread = x.var(0, unbiased=False).add(1e-5).sqrt()
        normal = (x - x.mean(0)) / spread
        ctx.save_for_backward(normal, spread, weight)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        normal, spread, weight = ctx.saved_tensors
        inner = grad * weight
        gradient = (inner - inner.mean(0) - normal * (inner * normal).mean(0)) / spread
        return gradient, (grad * normal).sum(0)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            again = (x @ weight).tanh()
        return torch.autograd.grad(again, (x, weight), 3 * grad)


class _Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * grad


def _mean(fc: nn.Linear, x: Tensor) -> Tensor:
    mean, positive, nothing, name = _Mean.apply(fc(x), x.shape[0])
    assert (nothing, name) == (None, "mean")
    return (mean * positive).square().sum()


def _doubled(fc: nn.Linear, x: Tensor) -> Tensor:
    y = fc(x) + 1
    return _Doubled.apply(y).square().mean() + y.sum()


def _hooked(fc: nn.Linear, x: Tensor) -> Tensor:
    y = fc(x)
    y.register_hook(lambda grad: grad.clamp(-0.01, 0.01) * x.shape[0])
    return y.square().mean() + y.sin().sum()


OWN: dict[str, Callable[..., Any]] = {
    "straight_through": lambda fc, x: _Sign.apply(fc(x)).sum(1).square().mean(),
    "reversed": lambda fc, x: fc(_Reversed.apply(fc(x), 0.5)).square().mean(),
    "mean": _mean,
    "normalized": lambda fc, x: _Normalized.apply(fc(x), fc.bias).tanh().sum(),
    "recomputed": lambda fc, x: _Recomputed.apply(x, fc.weight).square().mean(),
    "in_place": _doubled,
    "hook": _hooked,
}


@pytest.mark.parametrize("name", OWN)
def test_own_backwards(name: str) -> None:
    exact_body(OWN[name], rows(), splits=((4, 3), (5, 2, 0, 1)))


def test_without_gradients_only_the_forward_counts() -> None:
    with torch.no_grad():
        exact_body(OWN["straight_through"], rows(), splits=((4, 3),))


class _Runs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_a_function_of_a_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="_Runs takes a Linear as an argument"):
        exact_body(lambda fc, x: _Runs.apply(x, fc).sum(), rows())


def test_a_hook_that_only_looks_is_refused() -> None:
    seen: list[Tensor] = []

    def body(fc: nn.Linear, x: Tensor) -> Tensor:
        y = fc(x)
        y.register_hook(seen.append)
        return y.sum()

    with pytest.raises(CaptureError, match=r"test_backward.py:\d+ `y.register_hook\(seen.append\)`: a hook"):
        exact_body(body, rows())


def test_hooks_on_the_backward_of_modules_are_refused() -> None:
    model = nn.Sequential(linear(), nn.Tanh())
    model[1].register_full_backward_hook(lambda _, grad, __: (2 * grad[0],))
    with pytest.raises(CaptureError, match=r"hooks on the backward of modules.*1 \(Tanh\)"):
        check(model, (rows(),))
    with torch.no_grad():
        check(model, (rows(),))


def test_hooks_on_parameters_and_forwards() -> None:
    fc = linear()
    fc.weight.register_hook(lambda grad: 2 * grad)
    fc.register_forward_hook(lambda _, __, output: output.tanh())
    exact(Model(lambda fc, x: fc(x).mean(), fc), rows(), splits=((5, 2, 0, 1),))
