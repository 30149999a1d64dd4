"""Losses that couple all samples with all: negatives must be global."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.compiler.program import Program
from tests.exactness.cases import D, Model, classes, exact, exact_body, linear, rows, traffic

EMBEDDINGS = D * D * 8
"""Bytes of one side's embeddings: the least that a pairwise loss must gather, and its gradient reduce."""


def large(local: Program) -> list[tuple[str, str, int]]:
    """Phase, kind and bytes of all traffic but numbers that are one per batch, and parameters' gradients."""
    return [(row.phase, row.op, row.bytes) for row in traffic(local) if row.bytes > 16]


ONE_SIDE = [("forward", "all_gather", EMBEDDINGS), ("backward", "reduce_scatter", EMBEDDINGS)]
"""The smaller operand is gathered once for both directions; its gradient is the only thing to reduce."""


def _info_nce(a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T / 0.2
    return F.cross_entropy(logits, torch.arange(len(a), device=a.device))


def test_info_nce() -> None:
    local = exact_body(lambda fc, x, y: _info_nce(F.normalize(fc(x)), F.normalize(fc(y))), rows(), rows())
    assert large(local) == ONE_SIDE


def test_clip() -> None:
    def body(image: nn.Module, text: nn.Module, scale: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(image(x), dim=-1), F.normalize(text(y), dim=-1)
        logits = scale.weight.exp() * a @ b.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    local = exact(Model(body, linear(), linear(), nn.Linear(1, 1)), rows(), rows())
    column = D * 8  # a maximum, a sum, and the sum of the backward, of each text's similarities
    assert large(local) == [
        ONE_SIDE[0],
        ("forward", "all_reduce", column),
        ("forward", "all_reduce", column),
        ("backward", "all_reduce", column),
        ONE_SIDE[1],
    ]


def test_two_views_in_one_batch() -> None:
    """SimCLR: `cat` of both views, its own similarity masked by `eye`, positives on an off-diagonal."""

    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(torch.cat([fc(x), fc(y)]))
        count = len(x)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
        labels = torch.cat([torch.arange(count) + count, torch.arange(count)])
        return F.cross_entropy(logits, labels)

    both = [(phase, op, 2 * size) for phase, op, size in ONE_SIDE]
    assert large(exact_body(body, rows(), rows())) == both


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

    labels = ("forward", "all_gather", D * 8)
    assert large(exact_body(body, rows(), classes(count=3))) == [ONE_SIDE[0], labels, ONE_SIDE[1]]


def test_pairwise_distances() -> None:
    def body(fc: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
        z = fc(x)
        return torch.cdist(z, z + 1).sum(), torch.cdist(z, z + 1, p=1.0).mean(1), (z @ z.T).logsumexp(1)

    (gathered, *rest) = large(exact_body(body, rows()))
    assert gathered == ONE_SIDE[0], "z once: z + 1 and z.T are computed from it"
    assert {(op, size) for _, op, size in rest} <= {("reduce_scatter", EMBEDDINGS)}


def test_distances_of_every_samples_rows_to_every_sample() -> None:
    """As many samples as rows of the second side: a dim of batch size on both, which are not the same."""

    def body(fc: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
        z = fc(x)
        pairs = torch.stack([z, 2 * z], 1)
        return torch.cdist(pairs, z + 1).sum(), torch.cdist(z + 1, pairs, p=1.0).mean((1, 2))

    exact_body(body, rows())


def test_supervised_contrastive() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(fc(x))
        logits = z @ z.T / 0.3
        own = torch.eye(x.shape[0], dtype=torch.bool)
        positive = (y[:, None] == y[None, :]) & ~own
        log_p = logits - logits.masked_fill(own, -1e9).logsumexp(1, keepdim=True)
        return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()

    labels = ("forward", "all_gather", D * 8)
    assert large(exact_body(body, rows(), classes(count=3))) == [ONE_SIDE[0], labels, ONE_SIDE[1]]


def test_preferences() -> None:
    """DPO: chosen and rejected rows in one batch, their log-probabilities taken apart again."""

    def body(fc: nn.Linear, x: Tensor, y: Tensor, labels: Tensor, others: Tensor) -> Tensor:
        logp = fc(torch.cat([x, y])).log_softmax(-1)
        taken = logp.gather(1, torch.cat([labels, others]).unsqueeze(1)).squeeze(1)
        chosen, rejected = taken[: len(x)], taken[len(x) :]
        return -F.logsigmoid(chosen - rejected).mean()

    assert large(exact_body(body, rows(), rows(), classes(), classes())) == []


def test_siglip() -> None:
    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        logits = fc(x) @ fc(y).T
        n = logits.size(0)
        sign = 2 * torch.eye(n) - torch.ones(n, n)
        return -F.logsigmoid(sign * logits).sum() / n

    assert large(exact_body(body, rows(), rows())) == ONE_SIDE


def test_half_precision_is_gathered_before_it_is_widened() -> None:
    """A gather is moved above casts, expansions and arithmetic with full values to where it is smallest."""

    def body(fc: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        z = fc(x).to(torch.bfloat16)
        wide = (z.float() * 2 + fc.bias.float()).double()
        return (fc(y) @ wide.t()).sigmoid().sum() + (fc(y).unsqueeze(1) * wide).tanh().sum()

    traffic = large(exact_body(body, rows(), rows(), tolerance=1e-5))
    gathers = [row for row in traffic if row[1] == "all_gather"]
    assert ("forward", "all_gather", D * D * 2) in gathers
    assert all(size != EMBEDDINGS for phase, _, size in gathers if phase == "forward")


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
