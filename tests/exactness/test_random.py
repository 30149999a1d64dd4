"""Randomness: different masks on shards, the same in both directions, one seed for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxdp
from fxdp.compiler.program import Program
from tests.exactness.cases import D, Model, in_fours, linear, rows, traffic
from tests.lockstep import check
from tests.rank_pool import RankPool

SPLITS = ((4, 3), (5, 2, 0, 1))

RANDOM = {
    "dropout": lambda fc, x: F.dropout(fc(x), 0.5),
    "dropout_of_weights": lambda fc, x: x @ F.dropout(fc.weight, 0.5),
    "dropout2d": lambda fc, x: F.dropout2d(fc(x)[:, :, None, None], 0.5),
    "alpha_dropout": lambda fc, x: F.alpha_dropout(fc(x), 0.5, training=True),
    "noise": lambda fc, x: fc(x + torch.randn_like(x)) + torch.rand(x.shape[0], 1),
    "shared_noise": lambda fc, x: fc(x) * torch.rand(D),
    "bernoulli": lambda fc, x: fc(x) * torch.bernoulli(x.sigmoid()),
    "no_generator": lambda fc, x: fc(x) * torch.randn(x.shape, generator=None),
    "gumbel": lambda fc, x: F.gumbel_softmax(fc(x), hard=False),
    "reparametrized": lambda fc, x: fc(x) * torch.empty_like(x).normal_() + torch.normal(x, 1.0),
    "permutation": lambda fc, x: fc(x)[torch.randperm(len(x))].square() * x,
    "mixup": lambda fc, x: fc(0.3 * x + 0.7 * x[torch.randperm(x.shape[0])]),
    "stochastic_depth": lambda fc, x: x + fc(x) * (torch.rand(len(x), 1) > 0.5),
    "attention": lambda fc, x: F.scaled_dot_product_attention(
        fc(x)[:, None, None], x[:, None, None], x[:, None, None], dropout_p=0.5
    ),
    "rrelu": lambda fc, x: F.rrelu(fc(x), training=True),
    "multinomial": lambda fc, x: fc(x).gather(1, torch.multinomial(x.softmax(1), 1)),
    "without_replacement": lambda fc, x: fc(x).gather(1, torch.multinomial(x.softmax(1), 3)),
    "with_replacement": lambda fc, x: fc(x).gather(1, torch.multinomial(x.softmax(1), 3, replacement=True)),
    "turned": lambda fc, x: (fc(x).t() + torch.randn_like(x.t())) * F.dropout(fc(x).t(), 0.3),
    "by_value": lambda fc, x: fc(x) * torch.poisson(x.abs()),
    "binomial": lambda fc, x: fc(x) * torch.binomial(x.abs().ceil(), x.sigmoid()),
    "by_tensor": lambda fc, x: fc(x) * torch.normal(x, x.abs()),
    "integers": lambda fc, x: fc(x) * torch.randint_like(x, 5) * torch.randint(0, 5, x.shape),
    "in_place": lambda fc, x: (
        fc(x) * torch.empty_like(x).cauchy_().tanh() * torch.empty_like(x).geometric_(0.4)
        + torch.empty(x.shape).uniform_(-1, 1) * torch.empty_like(x).log_normal_()
    ),
    "reentrant": lambda fc, x: checkpoint(lambda y: F.dropout(fc(y)).relu(), x * fc.bias, use_reentrant=True),
    "checkpointed": lambda fc, x: checkpoint(lambda y: F.dropout(fc(y)).relu(), x, use_reentrant=False),
}  # fmt: skip


GATHERED = ("permutation", "mixup", "rrelu", "by_value", "binomial")
"""A permutation crosses samples; the others take as many numbers as the values ask for."""


@pytest.mark.parametrize("rng", ["sharded", "single-device"])
@pytest.mark.parametrize("names", in_fours(RANDOM, alone=(*GATHERED, "no_generator")), ids=" ".join)
def test_given_the_numbers_all_is_exact(names: tuple[str, ...], rng: str) -> None:
    """The lock-step reference uses the numbers that the ranks drew."""
    model = Model(lambda fc, x: tuple(RANDOM[name](fc, x).square().mean() for name in names), linear())
    local = exact_random(model, rows(), rng=rng)
    gathers = [row for row in traffic(local) if row.op == "all_gather"]
    assert bool(gathers) <= (names[0] in GATHERED), "drawing sends nothing"


def exact_random(model: nn.Module, x: Tensor, rng: str) -> Program:
    """Exact node by node; where ranks draw apart, eager is compared with the captured program."""
    return check(model, (x,), splits=SPLITS, rng=rng)


class Noisy(nn.Module):
    """Returns its dropout masks: of the batch, and of a value that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.fc(x)
        return {
            "own": F.dropout(torch.ones_like(y)),
            "shared": F.dropout(torch.ones(7)),
            "loss": F.dropout(y).square().mean() + (y + torch.randn_like(y)).tanh().mean(),
            "rand": torch.rand(x.shape[0], 3),
        }


def _draw(seed: int, split: list[int], rng: str, backend: str = "eager") -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(sum(split), 4)
    compiled = fxdp.compile(model, rng=rng, backend=backend)
    torch.manual_seed(seed)
    own = x.split(split)[dist.get_rank()]
    outs = []
    for _ in range(2):
        out = compiled(own)
        out["loss"].backward()
        outs.append({name: value.detach() for name, value in out.items()})
    assert model.fc.weight.grad is not None
    return {"outs": outs, "grad": model.fc.weight.grad, "next": torch.rand(1)}


def _runs(ranks: RankPool, split: list[int], rng: str) -> list[list[dict[str, Any]]]:
    return [ranks.run(len(split), _draw, seed, split, rng) for seed in (5, 5, 6)]


@pytest.mark.parametrize(
    ("split", "backend"), [([3], "inductor"), ([2, 3], "inductor"), ([3, 0, 1, 1], "eager")], ids=str
)
def test_single_device_numbers_are_eagers_bit_for_bit(
    ranks: RankPool, split: list[int], backend: str
) -> None:
    found = ranks.run(len(split), _draw, 5, split, "single-device", backend)
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(sum(split), 4)
    torch.manual_seed(5)
    for step in range(2):
        expected = model(x)
        expected["loss"].backward()
        for name in ("own", "rand"):
            assert torch.equal(torch.cat([rank["outs"][step][name] for rank in found]), expected[name])
        for rank in found:
            assert torch.equal(rank["outs"][step]["shared"], expected["shared"])
            torch.testing.assert_close(rank["outs"][step]["loss"], expected["loss"], rtol=1e-12, atol=0)
    after = torch.rand(1)
    for rank in found:
        torch.testing.assert_close(rank["grad"], model.fc.weight.grad, rtol=1e-9, atol=1e-12)
        assert torch.equal(rank["next"], after), "the user's generator moves on as on one device"


def test_sharded_numbers_differ_between_ranks_and_come_from_one_seed(ranks: RankPool) -> None:
    first, again, other = _runs(ranks, [3, 3], "sharded")
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a["outs"][0]["own"], b["outs"][0]["own"])
        assert torch.equal(a["grad"], b["grad"])
        assert not torch.equal(a["outs"][0]["own"], c["outs"][0]["own"])
        assert not torch.equal(a["outs"][0]["own"], a["outs"][1]["own"]), "each step draws anew"
    one, two = first
    assert not torch.equal(one["outs"][0]["own"], two["outs"][0]["own"]), "shards have masks of their own"
    assert torch.equal(one["outs"][0]["shared"], two["outs"][0]["shared"])
    assert torch.equal(one["outs"][0]["loss"], two["outs"][0]["loss"])
    assert torch.equal(one["next"], two["next"])
    keep = torch.cat([rank["outs"][0]["own"] for rank in first]).bool().double().mean()
    assert 0.3 < keep < 0.7


class NoisyGradients(nn.Module):
    """Noise on the gradients of the batch, and of what all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y.register_hook(lambda grad: torch.rand_like(grad) * torch.rand(16))
        return y.sum()


def _noise_of_gradients() -> list[Tensor]:
    """The gradients of one step: of this rank's samples, and of the bias."""
    torch.manual_seed(0)
    model, x = NoisyGradients(), torch.ones(3, 4, requires_grad=True)
    fxdp.compile(model, backend="eager")(x).backward()
    assert x.grad is not None
    assert model.fc.bias.grad is not None
    return [x.grad, model.fc.bias.grad]


def test_noise_in_the_backward_is_each_samples_own(ranks: RankPool) -> None:
    one, two = ranks.run(2, _noise_of_gradients)
    assert not torch.equal(one[0], two[0]), "each sample has noise of its own"
    assert torch.equal(one[1], two[1])
