"""Micro-batches on one rank: every loss has the denominator of the global batch, or is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.compiler.emit import Lowered, WantedPart, lower_part
from tests.captures import captured_once
from tests.exactness.cases import in_fours
from tests.exactness.models import counterpart_of, step_both

D = 5
Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]


def _labels(y: Tensor) -> Tensor:
    return torch.where(y.sum(1) > 1.5, -100, y.sum(1).abs().long() % D)


def _masked_mean(z: Tensor, y: Tensor, m: nn.Module) -> Tensor:
    mask = (y > 0).to(z.dtype)
    return (z.square() * mask).sum() / mask.sum().clamp(min=1)


EXACT: dict[str, Loss] = {
    "cross entropy": lambda z, y, m: F.cross_entropy(z, _labels(y)),
    "cross entropy, sum": lambda z, y, m: F.cross_entropy(z, _labels(y), reduction="sum"),
    "cross entropy, none and mean": lambda z, y, m: F.cross_entropy(z, _labels(y), reduction="none").mean(),
    "class weights": lambda z, y, m: F.cross_entropy(z, _labels(y), weight=torch.arange(1.0, D + 1).double()),
    "label smoothing": lambda z, y, m: F.cross_entropy(z, _labels(y), label_smoothing=0.1),
    "masked mean": _masked_mean,
    "sum over shape": lambda z, y, m: z.square().sum() / z.shape[0],
    "z-loss": lambda z, y, m: z.logsumexp(-1).square().mean(),
    "bce": lambda z, y, m: F.binary_cross_entropy(z.sigmoid(), y.sigmoid()),
    "bce, pos_weight": lambda z, y, m: F.binary_cross_entropy_with_logits(
        z, y.sigmoid(), pos_weight=torch.full((D,), 2.0).double()
    ),
    "kl, batchmean": lambda z, y, m: F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "huber": lambda z, y, m: F.huber_loss(z, y),
    "l1": lambda z, y, m: F.l1_loss(z, y),
    "smooth l1": lambda z, y, m: F.smooth_l1_loss(z, y),
    "mse": lambda z, y, m: F.mse_loss(z, y),
    "ctc": lambda z, y, m: F.ctc_loss(
        z.expand(3, -1, -1).log_softmax(-1),
        _labels(y).clamp(1)[:, None],
        torch.full_like(_labels(y), 3),
        torch.ones_like(_labels(y)),
    ),
    "mean over dims": lambda z, y, m: (z - y).square().mean(1).mean(),
    "cosine": lambda z, y, m: F.cosine_embedding_loss(z, y, torch.where(y[:, 0] > 0, 1, -1)),
    "a constant": lambda z, y, m: F.mse_loss(z, y) + 1.5,
    "a sum that begins with 0": lambda z, y, m: sum(F.l1_loss(z[:, i], y[:, i]) for i in range(D)),  # type: ignore[misc]
    "1 minus a mean": lambda z, y, m: (
        (1 - z.sigmoid().mean()) + F.mse_loss(z, y) + (2 * z.cos().mean() - 1) + F.l1_loss(z, y)
    ),
    "weight decay": lambda z, y, m: F.mse_loss(z, y) + 0.1 * sum((p * p).sum() for p in m.parameters()),  # type: ignore[misc]
    "group norm": lambda z, y, m: (
        (F.group_norm(z.unsqueeze(-1).expand(-1, D, 3), 1) - y.unsqueeze(-1)).abs().mean()
    ),
}

REFUSED: dict[str, Loss] = {
    "rmse": lambda z, y, m: F.mse_loss(z, y).sqrt(),
    "log of a mean": lambda z, y, m: z.square().mean().log(),
    "centred": lambda z, y, m: (z - z.mean(0)).abs().mean(),
    "variance": lambda z, y, m: z.var(0).sum(),
    "norm": lambda z, y, m: z.norm(),
    "balance": lambda z, y, m: (z.softmax(-1).mean(0) * z.sigmoid().mean(0)).sum(),
    "contrastive": lambda z, y, m: F.cross_entropy(z @ z.t(), torch.arange(z.shape[0])),
    "softmax over the batch": lambda z, y, m: (z.softmax(0) * y).sum(),
    "neighbours": lambda z, y, m: (z[1:] - z[:-1]).square().sum(),
    "batch norm": lambda z, y, m: F.mse_loss(F.batch_norm(z, None, None, training=True), y),
}


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, D)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.last(self.first(x).tanh()), y, self)


def _inputs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3).double(), torch.randn(batch, D).double()


def _error(model: nn.Module, batches: tuple[int, ...], microbatches: int, **options: Any) -> float:
    twin = counterpart_of(model)
    pipeline = {"microbatches": microbatches, **options.pop("pipeline", {})}
    compiled = fxdp.compile(model, pipeline=pipeline, backend="eager", **options)
    return max(step_both(compiled, twin, (_inputs(n), {}), None, [n], 0) for n in batches)


def _sum_of(names: tuple[str, ...]) -> Loss:
    return lambda z, y, m: reduce(add, [EXACT[name](z, y, m) for name in names])


@pytest.mark.parametrize("names", in_fours(EXACT), ids=", ".join)
def test_exact(names: tuple[str, ...]) -> None:
    """Several losses in one sum: each with a denominator of its own."""
    assert _error(Model(_sum_of(names)).double(), (7, 8, 2), 3) <= 1e-12


class Metrics(Model):
    """Returns numbers beside its loss, which nobody differentiates, though they depend on parameters."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        loss = super().forward(x, y)
        return loss, loss.exp(), -10 * loss.log10(), (loss - loss).sqrt()


def test_metrics_beside_the_loss() -> None:
    """Their gradients would need the full value loss in the midst; that of the last one is infinite."""
    assert _error(Metrics(EXACT["mse"]).double(), (7, 2), 3) <= 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_refused_or_exact(name: str) -> None:
    """Such a loss needs the global batch in the midst of the graph; a sum of it at the end is fine."""
    model = Model(REFUSED[name]).double()
    with pytest.raises(fxdp.StageError, match=r"microbatches=3\): .*\n(.|\n)*test_microbatches.py"):
        _error(model, (7,), 3)


class Coupled(Model):
    def __init__(self) -> None:
        super().__init__(EXACT["mse"])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.last(self.first(x))
        centred = hidden - hidden.mean(0)
        return (centred.softmax(0) * y).sum()


def test_all_reasons_are_listed_at_once() -> None:
    with pytest.raises(fxdp.StageError) as caught:
        _error(Coupled().double(), (7,), 2)
    assert "centred = hidden - hidden.mean(0)" in str(caught.value)
    assert "return (centred.softmax(0) * y).sum()" in str(caught.value)


class Whitened(Model):
    """Whitens its inputs by their covariance in the global batch, which it also keeps."""

    def __init__(self) -> None:
        super().__init__(EXACT["mse"])
        self.register_buffer("covariance", torch.zeros(3, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = x.T @ x / len(x) + torch.eye(3, dtype=x.dtype)
        with torch.no_grad():
            self.covariance.lerp_(found, 0.1)
        return super().forward(x @ torch.linalg.inv(found), y)


def test_products_of_the_inputs_over_the_batch() -> None:
    """They are known before the first micro-batch: the prologue computes the product that it sums."""
    for pipeline in ({}, {"stages": ["last"]}):
        assert _error(Whitened().double(), (7, 8, 2), 3, pipeline=pipeline) <= 1e-12


class Chosen(nn.Linear):
    """Keeps a sum over the rows that a mask selects, of values that the loss depends on."""

    def __init__(self) -> None:
        super().__init__(3, D)
        self.register_buffer("total", torch.zeros(D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        hidden = super().forward(x)
        with torch.no_grad():
            self.total += hidden[mask].sum(0)
        return hidden.square().mean()


def test_rows_selected_under_no_grad() -> None:
    """Their number, in a region of its own, made the loss one without a gradient."""
    model = Chosen().double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, pipeline={"microbatches": 3}, backend="eager")
    for batch in (7, 8, 2):
        x, y = _inputs(batch)
        inputs = x, y[:, 0] > 0
        assert step_both(compiled, twin, (inputs, {}), None, [batch], 0) <= 1e-12


class Centred(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - x.mean(0)


class Shown(Model):
    """Shows values that only the global batch has, at the end of the first stage and of the last."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden = self.first(x).tanh()
        found = self.last(hidden)
        shown, order = hidden.detach(), found.detach()[:, 0].argsort()
        centred = shown - shown.mean(0)
        spread = shown.var(0, correction=0)
        score = centred.square().mean() + spread.sum()
        return F.mse_loss(found, y), spread, centred, score, order, found[order]


def test_outputs_of_the_whole_batch() -> None:
    """They follow the last micro-batch; only what goes on from them in the model would be refused."""
    model = Shown(EXACT["mse"]).double()
    with captured_once():
        for schedule in ("1f1b", "zero-bubble"):
            assert _error(model, (7, 8, 2), 3, pipeline={"stages": ["last"], "schedule": schedule}) <= 1e-12


def test_evaluation_of_a_loss_over_all_pairs() -> None:
    """Without a backward nobody waits for it; a layer after it would run at the end, and is refused."""
    contrastive, centred = Model(REFUSED["contrastive"]).double(), Model(REFUSED["centred"]).double()
    for model in (contrastive, centred):
        compiled = fxdp.compile(model, pipeline={"microbatches": 3, "stages": 3}, backend="eager")
        for batch in (7, 4):
            inputs = _inputs(batch)
            with torch.no_grad():
                assert torch.allclose(compiled(*inputs), model(*inputs), rtol=1e-12)
    compiled = fxdp.compile(
        nn.Sequential(Centred(), nn.Linear(3, 2)), pipeline={"microbatches": 3}, backend="eager"
    )
    with torch.no_grad(), pytest.raises(fxdp.StageError, match=r"return x - x\.mean\(0\)"):
        compiled(torch.randn(4, 3))


def test_fewer_samples_than_micro_batches() -> None:
    with captured_once():
        for microbatches in (2, 4, 8):
            assert _error(Model(EXACT["masked mean"]).double(), (1, 3), microbatches) <= 1e-12


def test_recomputation() -> None:
    with captured_once():
        for checkpoint in ("always", "except_last"):
            assert (
                _error(Model(EXACT["huber"]).double(), (7,), 4, activation_checkpointing=checkpoint) <= 1e-12
            )


class Noisy(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.5, self.training)
        return self.last(hidden).square().mean()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_mask_is_the_same_when_it_is_recomputed(checkpoint: str) -> None:
    """The gradient of the bias of the last layer's input tells which elements were dropped."""
    model = Noisy(EXACT["mse"]).double()
    compiled = fxdp.compile(
        model, pipeline={"microbatches": 2}, backend="eager", activation_checkpointing=checkpoint
    )
    torch.manual_seed(3)
    loss = compiled(*_inputs(6))
    loss.backward()
    eps, weight = 1e-6, model.first.weight
    grad = weight.grad[0, 0].item()  # type: ignore[index]
    with torch.no_grad():
        weight[0, 0] += eps
    torch.manual_seed(3)
    again = compiled(*_inputs(6))
    assert (again - loss).item() / eps == pytest.approx(grad, rel=1e-3, abs=1e-7)


def test_masks_differ_between_micro_batches() -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            dropped = F.dropout(x * self.scale, 0.5)
            return dropped.sum(), dropped

    compiled = fxdp.compile(Mask(), pipeline={"microbatches": 2}, backend="eager")
    _, dropped = compiled(torch.ones(2, 64))
    assert (dropped[0] != dropped[1]).any()
    torch.manual_seed(1)
    first = compiled(torch.ones(2, 64))[1]
    torch.manual_seed(1)
    assert torch.equal(first, compiled(torch.ones(2, 64))[1])


def test_a_mask_of_all_samples_is_one_for_all_micro_batches() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            gates = F.dropout(torch.ones(64)) + F.alpha_dropout(torch.ones(64), training=True)
            gated = (x + self.bias) * gates
            return gated.sum(), gated, gates

    model = Gated()
    loss, gated, gates = fxdp.compile(model, pipeline={"microbatches": 3}, backend="eager")(torch.ones(5, 64))
    loss.backward()
    torch.testing.assert_close(gated, gates.expand(5, -1))
    torch.testing.assert_close(model.bias.grad, 5 * gates)
    assert len(gates.unique()) == 4


class LateMasks(nn.Module):
    """Shows two values of the global batch, of two stages, with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.a(x)
        second = self.b(first)
        shown = [F.dropout(h.detach() - h.detach().mean(0)) for h in (first, second)]
        return second.square().mean(), shown[0] != 0, shown[1] != 0


def test_masks_after_the_last_micro_batch_differ_between_stages() -> None:
    compiled = fxdp.compile(LateMasks(), pipeline={"microbatches": 2, "stages": ["b"]}, backend="eager")
    _, first, second = compiled(torch.randn(4, 4))
    assert 0 < first.sum() < first.numel()
    assert (first != second).any()


class Shared(nn.Module):
    """The gradients of `a` and `b` are one value, and that of `c` is a number spread out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.c = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b) * x).sum(1).mean() + self.c.sum()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_scaled_loss(microbatches: int) -> None:
    model, x = Shared(), torch.randn(4, 5)
    compiled = fxdp.compile(model, pipeline={"microbatches": microbatches, "stages": 1}, backend="eager")
    for _ in range(2):
        (compiled(x) * 0.25).backward()
    assert torch.allclose(model.a.grad, 0.5 * x.mean(0))  # type: ignore[arg-type]
    assert torch.allclose(model.b.grad, 0.5 * x.mean(0))  # type: ignore[arg-type]
    assert torch.allclose(model.c.grad, torch.full((5,), 0.5))  # type: ignore[arg-type]


class Weighted(Model):
    """Learns how much each of two losses weighs: the weights' gradients are losses of the global batch."""

    def __init__(self) -> None:
        super().__init__(EXACT["mse"])
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        first, second = self.weights.neg().exp()
        loss = F.cross_entropy(self.last(hidden), _labels(y)) * first + hidden.square().mean() * second
        return loss + self.weights.sum()


def test_learned_weights_of_losses() -> None:
    with captured_once():
        for schedule in ("1f1b", "zero-bubble"):
            assert (
                _error(Weighted().double(), (7, 2), 3, pipeline={"stages": 2, "schedule": schedule}) <= 1e-12
            )


def test_a_second_derivative_is_refused() -> None:
    model = Model(EXACT["mse"]).double()
    loss = fxdp.compile(model, pipeline={"microbatches": 2}, backend="eager")(*_inputs(4))
    (gradient,) = torch.autograd.grad(loss, [model.first.weight], create_graph=True)
    with pytest.raises(fxdp.StateError, match="a compiled module has first derivatives only"):
        (loss + gradient.square().sum()).backward()


def test_many_sizes_are_lowered_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those of the first call, and for any; what a program of one part does."""
    names: list[str] = []

    def counted(wanted: WantedPart, *args: Any, **options: Any) -> Lowered:
        names.append(wanted.name)
        return lower_part(wanted, *args, **options)

    monkeypatch.setattr("fxdp.compiler.lowered_parts.lower_part", counted)
    model = Model(EXACT["mse"]).double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, pipeline={"microbatches": 2}, backend="eager")
    for batch in (8, 7, 5, 4, 3, 9, 11):
        assert step_both(compiled, twin, (_inputs(batch), {}), None, [batch], 0) <= 1e-12
    assert max(Counter(names).values()) == 2
