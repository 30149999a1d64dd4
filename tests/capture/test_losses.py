"""Every mean-like loss is a sum and a global count, and equal to eager."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxdp.ir.graph.metadata import meta
from fxdp.ir.ops.ctc import CTC_BACKWARD_OP
from fxdp.ir.types.sizes import mentions_batch
from tests.exactness.cases import in_fours

from .oracle import check

C = 4


class Scores(nn.Module):
    def __init__(self, inputs: int = 5, outputs: int = C) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def _classes(shape: tuple[int, ...]) -> torch.Tensor:
    target = torch.randint(0, C, shape)
    target[torch.rand(shape) < 0.3] = -100
    target.view(-1)[0] = 1
    return target


def _real(b: int) -> torch.Tensor:
    return torch.randn(b, C)


def _unit(b: int) -> torch.Tensor:
    return torch.rand(b, C)


def _sign(b: int) -> torch.Tensor:
    return torch.randint(0, 2, (b, C)) * 2.0 - 1


def _label(b: int) -> torch.Tensor:
    return torch.randint(0, C, (b,))


def _masked(b: int) -> torch.Tensor:
    return _classes((b,))


def _covariance(z: torch.Tensor) -> torch.Tensor:
    z = z - z.mean(0)
    return z.T @ z / (z.shape[0] - 1)


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)

LOSSES = {
    "ce": (F.cross_entropy, _masked),
    "ce_weight": (lambda o, t: F.cross_entropy(o, t, WEIGHT), _masked),
    "ce_smooth": (lambda o, t: F.cross_entropy(o, t, WEIGHT, label_smoothing=0.1), _masked),
    "ce_soft": (lambda o, t: F.cross_entropy(o, t.softmax(1)), _real),
    "ce_sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), _masked),
    "ce_none_mean": (lambda o, t: F.cross_entropy(o, t, reduction="none").mean(), _masked),
    "ce_module": (nn.CrossEntropyLoss(weight=WEIGHT), _masked),
    "nll": (lambda o, t: F.nll_loss(o.log_softmax(1), t, WEIGHT), _masked),
    "mse": (F.mse_loss, _real),
    "mse_sum": (lambda o, t: F.mse_loss(o, t, reduction="sum"), _real),
    "mse_none": (lambda o, t: F.mse_loss(o, t, reduction="none").mean(), _real),
    "l1": (F.l1_loss, _real),
    "smooth_l1": (F.smooth_l1_loss, _real),
    "huber": (F.huber_loss, _real),
    "bce": (lambda o, t: F.binary_cross_entropy(o.sigmoid(), t, weight=WEIGHT), _unit),
    "bce_logits": (F.binary_cross_entropy_with_logits, _unit),
    "bce_pos_weight": (lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=WEIGHT), _unit),
    "kl_batchmean": (lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="batchmean"), _unit),
    "kl_mean": (lambda o, t: F.kl_div(o.log_softmax(1), t.log_softmax(1), log_target=True), _unit),
    "poisson": (F.poisson_nll_loss, _unit),
    "soft_margin": (F.soft_margin_loss, _sign),
    "multi_margin": (lambda o, t: F.multi_margin_loss(o, t, weight=WEIGHT), _label),
    "multilabel_margin": (F.multilabel_margin_loss, lambda b: torch.tensor([[2, 0, -1, 1]]).repeat(b, 1)),
    "multilabel_soft": (F.multilabel_soft_margin_loss, _unit),
    "hinge": (F.hinge_embedding_loss, _sign),
    "cosine": (lambda o, t: F.cosine_embedding_loss(o, t, (t[:, 0] > 0) * 2 - 1), _real),
    "triplet": (lambda o, t: F.triplet_margin_loss(o, t, t.roll(1, 1)), _real),
    "margin_ranking": (lambda o, t: F.margin_ranking_loss(o[:, 0], o[:, 1], t[:, 0], margin=0.5), _sign),
    "rmse": (lambda o, t: ((o - t) ** 2).mean().sqrt(), _real),
    "norm": (lambda o, t: (o - t).norm() + (o - t).abs().mean(), _real),
    "vicreg": (lambda o, t: o.var(0).mean() + _covariance(o).pow(2).sum() + (o - t).std(), _real),
    "var_mean": (lambda o, t: sum(torch.var_mean(o, (0, 1), correction=0)), _real),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("names", in_fours(LOSSES), ids=" ".join)
def test_losses_equal_eager(names: tuple[str, ...]) -> None:
    """Several in one sum, each with a denominator of its own; no op with a mean of its own is left."""

    def loss_fn(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(LOSSES[name][0](output, target[name]) for name in names)

    def targets(batch: int) -> dict[str, dict[str, torch.Tensor]]:
        return {"target": {name: LOSSES[name][1](batch) for name in names}}

    captured = check(
        Scores(), (torch.randn(5, 5),), targets(5), ((torch.randn(4, 5),), targets(4)), loss_fn=loss_fn
    )
    full = [node for node in captured.gm.graph.nodes if re.search(r"\.(mean|var|std)\.", str(node.target))]
    assert not [node for node in full if any(map(mentions_batch, meta(node.args[0]).type.shape))]
    reductions = {0, 2} if any("none" in name for name in names) else {2}
    for node in captured.gm.graph.nodes:
        if "nll_loss" in str(node.target):
            assert node.args[3 if "forward" in str(node.target) else 4] in reductions


def test_loss_2d_with_ignored_pixels() -> None:
    model = nn.Conv2d(2, C, 3, padding=1)
    check(model, (torch.randn(3, 2, 5, 6),), {"target": _classes((3, 5, 6))}, loss_fn=F.cross_entropy)


def test_fully_masked_is_nan_as_in_eager() -> None:
    check(Scores(), (torch.randn(3, 5),), {"target": torch.full((3,), -100)}, loss_fn=F.cross_entropy)


def test_ctc() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, C)

        def forward(self, x, target, x_lengths, lengths):
            scores = self.fc(x).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, target, x_lengths, lengths)

    def inputs(b: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(1, 4, (b,))
        return torch.randn(b, 9, 5), torch.randint(1, C, (b, 3)), torch.full((b,), 9), lengths

    check(Sequence(), inputs(3), {}, (inputs(4), {}))


def test_means_within_a_sample_stay_whole() -> None:
    captured = check(
        Scores(), (torch.randn(3, 5),), {"target": _real(3)}, loss_fn=lambda o, t: o.mean(-1).sum()
    )
    assert any(node.target == torch.ops.aten.mean.dim for node in captured.gm.graph.nodes)


def test_without_couplings_ops_stay_as_eager_has_them() -> None:
    captured = check(
        Scores(), (torch.randn(3, 5),), {"target": _masked(3)}, loss_fn=F.cross_entropy, couple=False, tol=0.0
    )
    losses = [
        node for node in captured.gm.graph.nodes if node.target == torch.ops.aten.nll_loss_forward.default
    ]
    assert losses[0].args[3] == 1


@pytest.mark.parametrize("samples", [0, 2])
def test_ctc_gradients_lie_as_compiled_code_expects(samples: int) -> None:
    """Whatever the order of the log-probabilities, which are often transposed."""
    x = torch.randn(samples, 5, C).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((samples,), 5), torch.full((samples,), 2)
    args = (torch.ones(samples), x, torch.ones(samples, 3, dtype=torch.long), *lengths, 0, False)
    torch.library.opcheck(CTC_BACKWARD_OP, args, test_utils="test_faketensor")
