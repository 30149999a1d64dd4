"""Losses: each has its own denominator, which must be the global one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exactness.cases import D, Model, classes, exact, exact_body, in_fours, linear, rows, traffic

REDUCTIONS = ("mean", "sum", "none")


def _signs(*size: int) -> Tensor:
    return torch.randint(0, 2, (D, *size)) * 2.0 - 1.0


def _weights() -> Tensor:
    return torch.rand(D) + 0.5


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "mse": (F.mse_loss, lambda: (rows(),)),
    "l1": (F.l1_loss, lambda: (rows(),)),
    "smooth_l1": (F.smooth_l1_loss, lambda: (rows(),)),
    "huber": (lambda o, t, reduction: F.huber_loss(o, t, reduction, delta=0.5), lambda: (rows(),)),
    "bce": (
        lambda o, t, reduction: F.binary_cross_entropy(o.sigmoid(), t, reduction=reduction),
        lambda: (rows().sigmoid(),),
    ),
    "bce_weight": (
        lambda o, t, w, reduction: F.binary_cross_entropy(o.sigmoid(), t, w, reduction=reduction),
        lambda: (rows().sigmoid(), rows(1).exp()),
    ),
    "bce_logits": (F.binary_cross_entropy_with_logits, lambda: (rows().sigmoid(),)),
    "bce_logits_pos_weight": (
        lambda o, t, reduction: F.binary_cross_entropy_with_logits(
            o, t, pos_weight=torch.linspace(0.5, 2, D), reduction=reduction
        ),
        lambda: (rows().sigmoid(),),
    ),
    "nll_class_weights": (
        lambda o, t, reduction: F.nll_loss(
            o.log_softmax(1), t, torch.linspace(0.5, 2, D), ignore_index=3, reduction=reduction
        ),
        lambda: (classes(),),
    ),
    "nll_2d": (
        lambda o, t, reduction: F.nll_loss(
            o.log_softmax(1)[:, :, None].expand(-1, -1, D), t, torch.linspace(0.5, 2, D), reduction=reduction
        ),
        lambda: (classes(D),),
    ),
    "cross_entropy": (F.cross_entropy, lambda: (classes(),)),
    "cross_entropy_smooth": (
        lambda o, t, reduction: F.cross_entropy(
            o, t, torch.linspace(0.5, 2, D), ignore_index=3, label_smoothing=0.1, reduction=reduction
        ),
        lambda: (classes(),),
    ),
    "cross_entropy_probabilities": (F.cross_entropy, lambda: (rows().softmax(1),)),
    "kl_div": (
        lambda o, t, reduction: F.kl_div(o.log_softmax(1), t, reduction=reduction),
        lambda: (rows().softmax(1),),
    ),
    "kl_div_log_target": (
        lambda o, t, reduction: F.kl_div(o.log_softmax(1), t, reduction=reduction, log_target=True),
        lambda: (rows().log_softmax(1),),
    ),
    "cosine_embedding": (
        lambda o, a, t, reduction: F.cosine_embedding_loss(o, a, t, margin=0.1, reduction=reduction),
        lambda: (rows(), _signs()),
    ),
    "triplet_margin": (F.triplet_margin_loss, lambda: (rows(), rows())),
    "margin_ranking": (
        lambda o, a, t, reduction: F.margin_ranking_loss(o, a, t, margin=0.3, reduction=reduction),
        lambda: (rows(), _signs(D)),
    ),
    "multi_margin": (F.multi_margin_loss, lambda: (classes(),)),
    "multilabel_margin": (F.multilabel_margin_loss, lambda: (torch.stack([torch.randperm(D)] * D),)),
    "multilabel_soft_margin": (F.multilabel_soft_margin_loss, lambda: (rows().sigmoid().round(),)),
    "soft_margin": (F.soft_margin_loss, lambda: (_signs(D),)),
    "hinge_embedding": (F.hinge_embedding_loss, lambda: (_signs(D),)),
    "poisson_nll": (F.poisson_nll_loss, lambda: (rows().abs(),)),
}


@pytest.mark.filterwarnings("ignore:reduction.*mean:UserWarning")
@pytest.mark.parametrize("names", in_fours(LOSSES), ids=" ".join)
def test_mean_sum_and_none(names: tuple[str, ...]) -> None:
    def body(fc: nn.Linear, x: Tensor, given: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        out = fc(x)
        pairs = [(LOSSES[name][0], targets) for name, targets in zip(names, given, strict=True)]
        return tuple(
            loss(out, *targets, reduction=reduction) for loss, targets in pairs for reduction in REDUCTIONS
        )

    exact_body(body, rows(), [LOSSES[name][1]() for name in names])


def test_kl_div_batchmean() -> None:
    exact_body(
        lambda fc, x, t: F.kl_div(fc(x).log_softmax(1), t, reduction="batchmean"), rows(), rows().softmax(1)
    )


def test_ctc() -> None:
    """Log-probabilities have the batch on dim 1; targets are shorter than the input."""
    lengths = torch.tensor([9, 10, 8, 10, 7, 10, 9, 10, 10, 10])
    wanted = torch.tensor([3, 1, 4, 2, 3, 4, 2, 1, 4, 3])

    def body(fc: nn.Linear, x: Tensor, t: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        scores = fc(x).log_softmax(2)
        return tuple(F.ctc_loss(scores, t, n, m, reduction=reduction) for reduction in REDUCTIONS)

    exact_body(
        body, torch.randn(D, D, D), torch.randint(1, D, (D, 4)), lengths, wanted,
        batch_dims=((1, 0, 0, 0), {}),
    )  # fmt: skip


class LanguageModel(nn.Module):
    """Next-token prediction with masked labels."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6)
        self.head = nn.Linear(6, vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.head(self.embed(ids).cumsum(1))
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def _masked(valid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 7, (len(valid), 42))
    labels = ids.clone()
    for row, count in enumerate(valid):
        labels[row, 1 + count :] = -100
    return ids, labels


def test_masked_language_model() -> None:
    """3, 17, 0 and 41 valid tokens: a rank without any has no mean of its own."""
    ids, labels = _masked((3, 17, 0, 41))
    splits = ((1, 1, 1, 1), (2, 1, 0, 1), (2, 2), (3, 1))
    local = exact(LanguageModel(7), ids, labels, splits=splits)
    sums = [row for row in traffic(local) if row.phase == "forward"]
    assert sum(row.bytes for row in sums) <= 16, "only the loss and its denominator travel"


def test_nothing_valid_anywhere() -> None:
    """Eager gives nan, and so must all ranks."""
    ids, labels = _masked((0, 0, 0, 0))
    exact(LanguageModel(7), ids, labels, splits=((2, 2),))


def test_loss_fn() -> None:
    exact(linear(), rows(), splits=((4, 3), (5, 2, 0, 1)), loss_fn=F.mse_loss, kwargs={"target": rows()})


def test_a_loss_written_by_hand() -> None:
    """Means by `sum / numel`, `sum / len`, and a masked mean."""

    def body(fc: nn.Linear, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        out = fc(x)
        return (
            out.square().sum() / out.numel(),
            out.square().sum() / len(out),
            (out.sum(1) * mask).sum() / mask.sum(),
            out.square().mean(1).mean(),
            out.std() + out.var(0).sum() + out.norm(),
            (out.mean(0) - 1).abs().max(),
            torch.logsumexp(out, 0).sum(),
        )

    splits = ((4, 3), (3, 3), (5, 2, 0, 1), (3, 3, 2, 2))  # one sample has no variance
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 1, 1])
    exact_body(body, rows(), mask, splits=splits)


def test_several_losses_of_one_model() -> None:
    def body(a: nn.Linear, b: nn.Linear, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = a(x).relu()
        first, second = F.cross_entropy(b(hidden), y), F.mse_loss(hidden, x)
        return first + 0.1 * second, first, second

    exact(Model(body, linear(), linear()), rows(), classes())
