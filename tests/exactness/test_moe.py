"""Mixture of experts: routing statistics are those of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.compiler.program import Program
from tests.exactness.cases import D, exact, linear, rows, traffic

EXPERTS = 4


class Mixture(nn.Module):
    """Top-2 routing over sequences, dense experts; returns the output and the balance losses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, D, D) / D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        probabilities = logits.softmax(-1)
        weight, chosen = probabilities.topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, EXPERTS).to(x.dtype)
        out = self.mix(flat, (mask * weight[..., None]).sum(1))
        balance = EXPERTS * (mask.sum(1).mean(0) * probabilities.mean(0)).sum()
        z_loss = torch.logsumexp(logits, -1).square().mean()
        return out.view_as(x), balance, z_loss

    def mix(self, flat: Tensor, gates: Tensor) -> Tensor:
        return torch.einsum("te,td,edf->tf", gates, flat, self.experts)


class ByTokens(Mixture):
    """Experts' weights gathered per token."""

    def mix(self, flat: Tensor, gates: Tensor) -> Tensor:
        top = gates.argmax(-1)
        return torch.bmm(flat[:, None], self.experts[top])[:, 0] * gates.gather(1, top[:, None])


class Capacity(Mixture):
    """Switch routing: tokens beyond an expert's capacity are dropped, counted along the global batch."""

    capacity = 3

    def mix(self, flat: Tensor, gates: Tensor) -> Tensor:
        top = F.one_hot(gates.argmax(-1), EXPERTS)
        position = torch.cumsum(top, 0) * top
        kept = (position <= self.capacity) & (position > 0)
        specs = F.one_hot((position - 1).clamp(0, self.capacity - 1), self.capacity) * kept[..., None]
        specs = specs.to(flat.dtype)
        inbox = torch.einsum("tec,td->ecd", specs, flat)
        outbox = torch.bmm(inbox, self.experts)
        return torch.einsum("tec,ecd,te->td", specs, outbox, gates)


class ByCounts(Mixture):
    """Counts by `bincount` and `index_add`, as older code has it."""

    def mix(self, flat: Tensor, gates: Tensor) -> Tensor:
        top = gates.argmax(-1)
        counts = torch.zeros(EXPERTS, dtype=flat.dtype).index_add(0, top, torch.ones_like(gates[:, 0]))
        load = torch.zeros(EXPERTS, dtype=flat.dtype).scatter_add(0, top, gates.sum(-1))
        return super().mix(flat, gates) * (counts / counts.sum())[top][:, None] + load[top][:, None]


def counts_alone(local: Program) -> bool:
    """The closed form of a balance loss: two sums per expert and one of the other loss, no token travels."""
    sent = traffic(local)
    assert {row.op for row in sent} == {"all_reduce"}
    return sum(row.bytes for row in sent) == 2 * EXPERTS * 8 + 8


def test_balance_loss_of_dense_experts() -> None:
    assert counts_alone(exact(Mixture(), rows(D)))


def test_experts_gathered_per_token() -> None:
    assert counts_alone(exact(ByTokens(), rows(D)))


def test_capacity_counts_along_the_global_batch() -> None:
    exact(Capacity(), rows(D))


def test_counts_by_scatter() -> None:
    exact(ByCounts(), rows(D))


def test_experts_by_index_select_are_exact_or_refused() -> None:
    """Hugging Face's loop over experts: the tokens of each have a data-dependent number."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(D, 2)
            self.experts = nn.ModuleList(linear() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            top = self.gate(x).argmax(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (index,) = torch.where(top == number)
                out = out.index_add(0, index, expert(x[index]))
            return out

    exact(Loop(), rows())
