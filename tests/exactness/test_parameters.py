"""Parameters and buffers of all kinds; `grad is None` exactly where eager has None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from fxdp.compiler.planning import Planning
from tests.exactness.cases import D, Model, classes, exact, exact_body, linear, rows, traffic
from tests.lockstep import check

SPLITS = ((4, 3), (5, 2, 0, 1))


class Tied(nn.Module):
    """The head is the embedding, and the middle layer appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(D, D)
        self.middle = self.again = nn.Linear(D, D)
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.again(self.middle(self.embed(ids)).relu())
        return F.cross_entropy(self.head(hidden).transpose(1, 2), ids)


def test_tied_weights() -> None:
    local = exact(Tied(), classes(D), splits=SPLITS)
    rows_ = [row for row in Planning(local, {"B": D}).plan().causes if "gradient of" in row.cause]
    assert len(rows_) == 3, "one reduction each: embedding, weight and bias"


def test_parametrized_twice() -> None:
    """A parameter used full, as a slice, and transposed."""

    def body(fc: nn.Linear, x: Tensor) -> Tensor:
        return (fc(x) @ fc.weight.T + x @ fc.weight[:3].T @ fc.weight[:3]).square().mean() + fc.weight.norm()

    exact_body(body, rows(), splits=SPLITS)


def test_frozen_and_unused() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = linear(), linear(), linear()
            self.frozen.requires_grad_(False)
            self.used.bias.requires_grad_(False)
            self.cut = linear()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(self.frozen(x)).square().mean(), self.cut(x).detach()

    exact(Partly(), rows(), splits=SPLITS)


def test_lora() -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = linear().requires_grad_(False)
            self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.base(x) + 0.5 * self.up(self.down(x))).square().mean()

    model = LoRA()
    local = exact(model, rows(), splits=SPLITS)
    plan = Planning(local, {"B": D}).plan()
    assert plan.gradient_bytes == sum(p.numel() * 8 for p in model.parameters() if p.requires_grad)


def test_a_gradient_that_is_zero_is_not_none() -> None:
    exact_body(lambda fc, x: (fc(x) * 0).sum() + (fc.weight * 0).sum(), rows(), splits=SPLITS)


def test_gradient_without_data() -> None:
    """Weight decay in the loss: a parameter whose gradient needs no reduction."""

    def body(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
        return a(x).square().mean() + b.weight.square().sum()

    local = exact(Model(body, linear(), linear()), rows(), splits=SPLITS)
    assert Planning(local, {"B": D}).plan().gradient_bytes == (D * D + D) * 8


class Scalars(nn.Module):
    """0-dim, 1-element and odd-sized parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, D))
        self.odd = nn.Parameter(torch.randn(3, 7))
        self.fc = nn.Linear(D, 7)

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(torch.cat([x, self.empty])) * self.scale + self.one
        return (out @ self.odd.T).tanh().mean()


def test_scalar_and_odd_parameters() -> None:
    exact(Scalars(), rows(), splits=SPLITS)


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D, dtype=dtype))
        self.phase = nn.Parameter(torch.randn(D, dtype=dtype))
        self.register_buffer("rotation", torch.randn(D, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = (x.to(self.weight.dtype) @ self.weight + self.phase) * self.rotation
        return z.abs().square().mean(), torch.view_as_real(z)


def test_complex_parameters() -> None:
    exact(Complex(), rows(), splits=SPLITS)


class Filter(nn.Module):
    """Fourier features, as in FNO."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=D).square().mean(0)


def test_complex_filter() -> None:
    exact(Filter(), rows(), splits=SPLITS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_parameters(dtype: torch.dtype) -> None:
    """The ranks' sums are rounded in their own dtype, so equal to its precision."""
    model = Model(lambda fc, x: fc(x.to(dtype)).square().mean(), linear().to(dtype))
    exact(model, rows(), splits=((4, 3), (5, 2, 0, 1)), tolerance=20 * torch.finfo(dtype).eps)


def test_mixed_precision_parameters() -> None:
    def body(a: nn.Linear, b: nn.Linear, x: Tensor) -> Tensor:
        return b(a(x).float()).double().mean()

    model = Model(body, linear(), nn.Linear(D, D).float())
    exact(model, rows(), splits=SPLITS, tolerance=1e-5)


class Counting(nn.Module):
    """Integer and bool buffers, an integer parameter, and a buffer shared by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.order = nn.Parameter(torch.randperm(D), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("histogram", torch.zeros(D, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(D, dtype=torch.bool))
        self.register_buffer("hidden", torch.ones(D), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        self.histogram += F.one_hot(y, D).sum(0)
        self.seen |= F.one_hot(y, D).bool().any(0)
        return (self.fc(x)[:, self.order] * self.hidden).mean() / self.steps


def test_integer_parameters_and_buffers() -> None:
    exact(Counting(), rows(), classes(), splits=SPLITS)


@dataclass
class Result:
    loss: Tensor
    aux: dict[str, object]


torch.utils._pytree.register_dataclass(Result)

STRUCTURES: dict[str, Callable[[nn.Linear, Tensor], object]] = {
    "dataclass": lambda fc, x: Result(fc(x).sum(), {"logits": fc(x), "none": None, "n": 3}),
    "model_output": lambda fc, x: SequenceClassifierOutput(fc(x).sum(), fc(x)),
    "nested": lambda fc, x: (fc(x).sum(), [fc(x), {"a": (None, 1.5, "text", True)}]),
    "same_twice": lambda fc, x: (lambda y: (y, y, y.sum(), y.T))(fc(x)),
    "input_returned": lambda fc, x: (x, fc(x), fc.weight),
    "named_tuple": lambda fc, x: fc(x).max(1),
    "no_tensor_but_one": lambda fc, x: {"loss": fc(x).mean(), "size": x.shape, "dim": x.dim()},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_output_structures(name: str) -> None:
    exact_body(STRUCTURES[name], rows(), splits=SPLITS)


def test_module_without_parameters() -> None:
    check(Model(lambda x: x.softmax(0).sum(1)), (rows(),), splits=SPLITS)


def test_gradients_of_inputs() -> None:
    x, w = rows().requires_grad_(), rows().requires_grad_()
    local = exact_body(
        lambda fc, x, w: (fc(x) @ w).square().mean(), x, w, batch_dims=((0, None), {}), splits=SPLITS
    )
    assert any("gradient of input" in row.cause for row in Planning(local, {"B": D}).plan().causes)
    assert traffic(local)
