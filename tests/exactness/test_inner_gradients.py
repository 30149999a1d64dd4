"""Derivatives that the model itself takes, which its backward goes through a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fxdp
from tests.exactness.cases import Model, exact, exact_body, in_fours, linear, rows

SPLITS = ((4, 3), (5, 2, 0, 1))


def _penalty(fc: nn.Linear, x: Tensor) -> Tensor:
    """A critic's gradient penalty, as of WGAN-GP."""
    x = x.detach().requires_grad_()
    score = fc(x).tanh().sum(1)
    (slope,) = torch.autograd.grad(score, x, torch.ones_like(score), create_graph=True)
    return score.mean() + (slope.norm(dim=1) - 1).square().mean()


def _forces(fc: nn.Linear, x: Tensor) -> Tensor:
    """The forces of a potential, its positions marked by an assignment."""
    with torch.enable_grad():
        at = x.clone()
        at.requires_grad = True
        energy = F.silu(fc(at[:, None] - at[:, :, None].mean(1, keepdim=True))).sum((1, 2))
        forces = -torch.autograd.grad([energy.sum()], [at], create_graph=True)[0]
    return F.mse_loss(forces, x.sin()) + energy.mean()


def _attack(fc: nn.Linear, x: Tensor) -> Tensor:
    """A step against the loss, which is a constant for the backward."""
    at = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(fc(at).square().mean(), at)
    return fc(x + 0.1 * slope.sign()).square().mean()


def _inner_step(fc: nn.Linear, x: Tensor) -> Tensor:
    """A step of the weights within the step, as of MAML, and of a scale; one of them is used nowhere."""
    scale = torch.tensor(1.0, dtype=x.dtype, requires_grad=True)
    weights = {**dict(fc.named_parameters()), "other": torch.zeros(2, requires_grad=True), "scale": scale}
    found = functional_call(fc, {k: weights[k] for k in ("weight", "bias")}, (x,))
    loss = (found * scale).tanh().square().mean()
    slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True, materialize_grads=True)
    moved = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
    return F.linear(x, moved["weight"], moved["bias"]).square().mean() * moved["scale"] + moved["other"].sum()


BODIES: dict[str, Callable[..., Tensor]] = {
    "penalty": _penalty, "forces": _forces, "attack": _attack, "inner step": _inner_step,
}  # fmt: skip


@pytest.mark.parametrize("names", in_fours(BODIES))
def test_inner_gradients(names: tuple[str, ...]) -> None:
    def body(fc: nn.Linear, x: Tensor) -> Any:
        return torch.stack([BODIES[name](fc, x) for name in names]).sum()

    exact_body(body, rows(), splits=SPLITS)


def test_through_batch_norm_and_convolutions() -> None:
    def body(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        score = F.leaky_relu(norm(conv(x)), 0.2).mean((1, 2, 3))
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return slope.flatten(1).norm(dim=1).square().mean()

    exact(Model(body, nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), rows(2, 4, 4), splits=SPLITS[1:])


def test_without_gradients_around_it() -> None:
    model = Model(_forces, linear()).double().eval()
    compiled, x = fxdp.compile(model, backend="eager"), rows().double()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert not torch.is_grad_enabled()  # an attempt that had failed left it on
