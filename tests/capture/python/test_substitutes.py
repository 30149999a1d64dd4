"""What stands in for functions of torch while a model is captured: equal values, equal gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn import functional as F

import fxdp
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.capture.python import substitutes
from fxdp.capture.python.substitutes import is_positive_definite, is_symmetric
from tests import lockstep
from tests.capture.oracle import check

F64 = torch.float64


def assert_same(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, **options: Any
) -> None:
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        value = function(*leaves, **options)
        wanted = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(value.sin().sum(), wanted)
        results.append([value, *grads])
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("weights", [(), ("fweights",), ("aweights",), ("fweights", "aweights")], ids=str)
def test_cov(correction: int, weights: tuple[str, ...]) -> None:
    given = {"fweights": torch.tensor([1, 2, 1, 3, 1]), "aweights": torch.rand(5, dtype=F64)}
    options = {name: given[name] for name in weights}
    for x in (torch.randn(3, 5, dtype=F64), torch.randn(5, dtype=F64), torch.randn(1, 5, dtype=F64)):
        assert_same(substitutes.cov, torch.cov, x, correction=correction, **options)


def test_corrcoef() -> None:
    for x in (torch.randn(3, 5, dtype=F64), torch.randn(5, dtype=F64)):
        assert_same(substitutes.corrcoef, torch.corrcoef, x)
    z = torch.randn(3, 5, dtype=torch.complex128)
    torch.testing.assert_close(substitutes.corrcoef(z), torch.corrcoef(z))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_bag(mode: str, padding_idx: int | None) -> None:
    weight, rows = torch.randn(6, 3, dtype=F64), torch.randint(6, (5, 4))
    rows[0] = 2  # all of a bag is padding
    options = {"mode": mode, "padding_idx": padding_idx}
    assert_same(lambda w, **o: substitutes.embedding_bag(rows, w, **o),
                lambda w, **o: F.embedding_bag(rows, w, **o), weight, **options)  # fmt: skip


def test_weighted_embedding_bag() -> None:
    weight, rows = torch.randn(6, 3, dtype=F64), torch.randint(6, (5, 4))
    factors = torch.randn(5, 4, dtype=F64)
    assert_same(
        lambda w, f: substitutes.embedding_bag(rows, w, mode="sum", per_sample_weights=f),
        lambda w, f: F.embedding_bag(rows, w, mode="sum", per_sample_weights=f),
        weight,
        factors,
    )


def test_bags_at_offsets_are_left_to_torch() -> None:
    weight, rows, starts = torch.randn(6, 3), torch.randint(6, (7,)), torch.tensor([0, 2, 2])
    assert torch.equal(substitutes.embedding_bag(rows, weight, starts), F.embedding_bag(rows, weight, starts))


def test_torch_is_as_before() -> None:
    before = dict(vars(torch.Tensor)), F.embedding_bag, torch.cov
    with capture_patches(nn.Identity(), None):
        with pytest.raises(RuntimeError, match="expected numbers of at most two dims"):  # as ours says it
            torch.cov(torch.zeros(2, 2, 2))
        assert torch.Tensor.cov is substitutes.cov
    assert (dict(vars(torch.Tensor)), F.embedding_bag, torch.cov) == before


class Bags(nn.Module):
    """A table read in bags, and terms that couple features over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode="mean", padding_idx=0)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.head(self.bag(tokens)).T
        return torch.cov(features).square().sum() + features.corrcoef().square().mean()


def test_a_model_of_them_splits_over_ranks() -> None:
    """Nothing of the size of the batch travels, and no op runs replicated."""
    torch.manual_seed(0)
    model = Bags().double()
    tokens = torch.randint(11, (7, 5))
    fxdp.verify(model, (tokens,), mesh={"dp": 4}).raise_if_wrong()
    plan = fxdp.plan(model, (tokens,), mesh={"dp": 4})
    assert {row.op for row in plan.communication} == {"all_reduce"}
    assert not plan.coverage()


class Masked(nn.Module):
    """torch's own transformer, with masks and without saying that they are causal."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
        self.net = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **shape)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal, band = torch.full((4, 4), -math.inf).triu(1), torch.full((3, 3), -math.inf).triu(2)
        return self.net(source, target, src_mask=causal, tgt_mask=band)


def test_masks_of_transformers() -> None:
    inputs = torch.randn(3, 4, 8), torch.randn(3, 3, 8)
    check(Masked(), inputs, None, ((torch.randn(5, 4, 8), torch.randn(5, 3, 8)), {}), differentiable="all")


class Selected(nn.Module):
    """A loss of the places that a mask chooses, in both tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chosen, rows = y > 0, y[:, :1] > 0
        loss = F.l1_loss(self.fc(x).masked_select(chosen), torch.masked_select(y, chosen))
        return loss + self.fc(x).masked_select(rows).square().mean()


def test_one_mask_selects_as_many_of_both() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(7, 3, dtype=F64), torch.randn(7, 3, dtype=F64)
    fxdp.verify(Selected().double(), inputs, mesh={"dp": 4}).raise_if_wrong()


class Gaussians(nn.Module):
    """A covariance for each sample, which torch's distribution checks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.fc(x)
        root = out[:, 2:].view(-1, 2, 2)
        covariance = root @ root.mT + torch.eye(2, dtype=x.dtype)
        found = torch.distributions.MultivariateNormal(out[:, :2], covariance, validate_args=True)
        return -found.log_prob(y).mean()  # validate_args: Dynamo, once imported, makes False the default


def test_covariances_of_gaussians() -> None:
    """Whether they are positive definite is checked at each step, as in eager."""
    inputs = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    local = lockstep.check(Gaussians().double(), inputs)
    assert local.captured.checks
    skewed = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    for matrix in (skewed, -torch.eye(2), torch.eye(2), skewed @ skewed.mT, torch.ones(2, 3)):
        for constraint in (constraints.symmetric, constraints.positive_definite):
            wanted = constraint.check(matrix)  # type: ignore[no-untyped-call]
            mine = is_symmetric if constraint is constraints.symmetric else is_positive_definite
            assert torch.equal(mine(constraint, matrix), wanted)


class Rolled(nn.Module):
    """Autoformer: values are moved by the delay at which the global batch repeats itself most."""

    def forward(self, x: Tensor) -> Tensor:
        delay = x.mean(0).argmax()
        return (x.roll(-int(delay), 1) * torch.roll(x, int(delay), dims=1).exp()).sum(1)


def test_roll_by_a_number_of_the_data() -> None:
    lockstep.check(Rolled(), (torch.randn(8, 5, dtype=F64),))
