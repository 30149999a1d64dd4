"""Each loss of torch.nn.functional, by mean, sum and sample, with gradients: what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool


def _batchmean(reduction: str) -> str:
    return "batchmean" if reduction == "mean" else reduction  # torch warns of the other


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, str], Tensor]] = {
    "binary_cross_entropy": lambda a, b, y, r: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction=r),
    "binary_cross_entropy_with_logits": lambda a, b, y, r: F.binary_cross_entropy_with_logits(
        a, b.sigmoid(), pos_weight=torch.linspace(0.5, 2, 4), reduction=r
    ),
    "cosine_embedding_loss": lambda a, b, y, r: F.cosine_embedding_loss(
        a, b, 2.0 * (y > 1) - 1, 0.1, reduction=r
    ),
    "cross_entropy": lambda a, b, y, r: F.cross_entropy(a, y, label_smoothing=0.2, reduction=r),
    "cross_entropy of probabilities": lambda a, b, y, r: F.cross_entropy(a, b.softmax(1), reduction=r),
    "ctc_loss": lambda a, b, y, r: F.ctc_loss(
        torch.stack([a, b, a * b, a + b]).log_softmax(2),
        (y % 3 + 1)[:, None],
        torch.full((len(y),), 4),
        torch.ones(len(y), dtype=torch.long),
        reduction=r,
    ),
    "gaussian_nll_loss": lambda a, b, y, r: F.gaussian_nll_loss(a, b, b.exp(), reduction=r),
    "hinge_embedding_loss": lambda a, b, y, r: F.hinge_embedding_loss(
        a, torch.where(b > 0, 1, -1), reduction=r
    ),
    "huber_loss": lambda a, b, y, r: F.huber_loss(a, b, reduction=r, delta=0.5),
    "kl_div": lambda a, b, y, r: F.kl_div(a.log_softmax(1), b.softmax(1), reduction=_batchmean(r)),
    "kl_div of logs": lambda a, b, y, r: F.kl_div(
        a.log_softmax(1), b.log_softmax(1), reduction=_batchmean(r), log_target=True
    ),
    "l1_loss": lambda a, b, y, r: F.l1_loss(a, b, reduction=r),
    "margin_ranking_loss": lambda a, b, y, r: F.margin_ranking_loss(
        a, b, torch.where(b > 0, 1, -1), 0.1, reduction=r
    ),
    "mse_loss": lambda a, b, y, r: F.mse_loss(a, b, reduction=r),
    "multi_margin_loss": lambda a, b, y, r: F.multi_margin_loss(
        a, y, weight=torch.linspace(0.5, 2, 4), reduction=r
    ),
    "multilabel_margin_loss": lambda a, b, y, r: F.multilabel_margin_loss(
        a, torch.stack([y, (y + 1) % 4, -torch.ones_like(y), y], 1), reduction=r
    ),
    "multilabel_soft_margin_loss": lambda a, b, y, r: F.multilabel_soft_margin_loss(
        a, (b > 0).double(), reduction=r
    ),
    "nll_loss": lambda a, b, y, r: F.nll_loss(
        a.log_softmax(1), torch.where(y == 1, -100, y), torch.linspace(0.5, 2, 4), reduction=r
    ),
    "nll_loss of images": lambda a, b, y, r: F.nll_loss(
        torch.stack([a, b], 1).log_softmax(1)[:, :, :, None],
        (y > 1).long()[:, None, None].expand(-1, 4, 1),
        reduction=r,
    ),
    "poisson_nll_loss": lambda a, b, y, r: F.poisson_nll_loss(a, b.exp(), full=True, reduction=r),
    "smooth_l1_loss": lambda a, b, y, r: F.smooth_l1_loss(a, b, reduction=r, beta=0.5),
    "soft_margin_loss": lambda a, b, y, r: F.soft_margin_loss(a, torch.where(b > 0, 1.0, -1.0), reduction=r),
    "triplet_margin_loss": lambda a, b, y, r: F.triplet_margin_loss(a, b, a * b, reduction=r),
    "triplet_margin_with_distance_loss": lambda a, b, y, r: F.triplet_margin_with_distance_loss(
        a, b, a * b, distance_function=F.pairwise_distance, swap=True, reduction=r
    ),
}
"""Of scores and other values `a`, `b`: [8, 4], and labels `y`: [8]: twice as many samples as classes."""


def _results(batch: Any, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    a, b = (torch.randn(8, 4).requires_grad_() for _ in range(2))
    shown = batch(a.detach(), b.detach(), torch.tensor([3, 0, 1, 2, 1, 0, 3, 2]))
    a, b, y = shown[0].requires_grad_(), shown[1].requires_grad_(), shown[2]
    found: dict[str, Any] = {}
    for reduction in ("mean", "sum", "none"):
        loss = LOSSES[name](a, b, y, reduction)
        grads = torch.autograd.grad((loss * loss).sum(), (a, b), allow_unused=True)
        found |= {reduction: loss, **{f"{reduction} {i}": g for i, g in enumerate(grads) if g is not None}}
    return found


def _errors(split: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    return {
        name: difference(plain(_results(on_one_device, name)), plain(_results(OnRanks(split), name)))
        for name in LOSSES
    }


def test_each_loss_is_one_devices(ranks: RankPool) -> None:
    for found in ranks.run(3, _errors, (5, 0, 3)):
        assert {name: where for name, (error, where) in found.items() if error > EXACT} == {}
        assert found.keys() == LOSSES.keys()


def test_all_losses_of_torch_are_here() -> None:
    named = (name for name in vars(F) if name.endswith(("_loss", "cross_entropy", "kl_div", "_with_logits")))
    every = {name for name in named if not name.startswith("_")}
    assert len(every) > 20
    assert every - {name.partition(" ")[0] for name in LOSSES} <= {"linear_cross_entropy"}
