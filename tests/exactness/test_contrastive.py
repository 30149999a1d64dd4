"""Losses that couple all samples with all: negatives must be global."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exactness.cases import Model, classes, exact, exact_body, linear, rows


def _info_nce(a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T / 0.2
    return F.cross_entropy(logits, torch.arange(len(a), device=a.device))


def test_info_nce() -> None:
    exact_body(lambda fc, x, y: _info_nce(F.normalize(fc(x)), F.normalize(fc(y))), rows(), rows())


def test_clip() -> None:
    def body(image: nn.Module, text: nn.Module, scale: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(image(x), dim=-1), F.normalize(text(y), dim=-1)
        logits = scale.weight.exp() * a @ b.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    exact(Model(body, linear(), linear(), nn.Linear(1, 1)), rows(), rows())


def test_two_views_in_one_batch() -> None:
    """SimCLR: `cat` of both views, its own similarity masked by `eye`, positives on an off-diagonal."""

    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(torch.cat([fc(x), fc(y)]))
        count = len(x)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
        labels = torch.cat([torch.arange(count) + count, torch.arange(count)])
        return F.cross_entropy(logits, labels)

    exact_body(body, rows(), rows())


def test_barlow_twins() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        a, b = fc(x), fc(y)
        a, b = (a - a.mean(0)) / (a.std(0) + 1e-3), (b - b.mean(0)) / (b.std(0) + 1e-3)
        c = a.T @ b / x.shape[0]
        on = (torch.diagonal(c) - 1).square().sum()
        off = c.square().sum() - torch.diagonal(c).square().sum()
        return on + 0.01 * off

    exact_body(body, rows(), rows(), splits=((4, 3), (3, 3), (5, 2, 0, 1), (3, 3, 2, 2)))


def test_vicreg() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        a, b = fc(x), fc(y)
        a = a - a.mean(0)
        spread = F.relu(1 - (a.var(0) + 1e-4).sqrt()).mean()
        covariance = a.T @ a / (len(a) - 1)
        off = covariance.flatten()[:-1].view(9, 11)[:, 1:].flatten().square().sum()
        return F.mse_loss(a, b) + spread + off

    exact_body(body, rows(), rows(), splits=((4, 3), (3, 3), (5, 2, 0, 1)))


def test_batch_hard_triplet() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        z = fc(x)
        distance = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(-1).add(1e-9).sqrt()
        same = y.unsqueeze(0) == y.unsqueeze(1)
        hardest = (distance * same).max(1).values
        nearest = distance.masked_fill(same, 1e6).min(1).values
        return F.relu(hardest - nearest + 5).mean()

    exact_body(body, rows(), classes(count=3))


def test_pairwise_distances() -> None:
    def body(fc: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
        z = fc(x)
        return torch.cdist(z, z + 1).sum(), torch.cdist(z, z + 1, p=1.0).mean(1), (z @ z.T).logsumexp(1)

    exact_body(body, rows())


def test_supervised_contrastive() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(fc(x))
        logits = z @ z.T / 0.3
        own = torch.eye(x.shape[0], dtype=torch.bool)
        positive = (y[:, None] == y[None, :]) & ~own
        log_p = logits - logits.masked_fill(own, -1e9).logsumexp(1, keepdim=True)
        return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()

    exact_body(body, rows(), classes(count=3))


def test_siglip() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        logits = fc(x) @ fc(y).T
        n = logits.size(0)
        sign = 2 * torch.eye(n) - torch.ones(n, n)
        return -F.logsigmoid(sign * logits).sum() / n

    exact_body(body, rows(), rows())


def test_memory_bank() -> None:
    """Negatives from a buffer, which takes up the batch mean."""

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear()
            self.register_buffer("bank", torch.randn(10, 10))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.fc(x)
            loss = F.cross_entropy(z @ self.bank.clone().T, y)
            self.bank[0] = z.detach().mean(0)
            return loss

    exact(Bank(), rows(), classes())
