"""Hand-made models of the visible zoo, and the comparison of a rank's results with one eager device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxdp.ir.tensor_difference import difference
from tests.capture.unet import UNet, unet_inputs
from tests.captures import KNOWN, capture_ahead, captured_once


class Mlp(nn.Module):
    """Batch normalization, tied to nothing; the loss is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(x)
        return F.cross_entropy(out, y), out


class TwoTower(nn.Module):
    """Contrastive: every sample is the negative of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = self.scale.exp() * left @ right.T
        labels = torch.arange(len(a))
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
        return {"loss": loss / 2, "left": left}


class Lstm(nn.Module):
    """The batch is on dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 7, num_layers=2)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.rnn(x)[0])
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1), out


class Dlrm(nn.Module):
    """Bags of embeddings, their dot products, and dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 6, mode=mode) for mode in ("sum", "mean", "sum"))
        self.bottom = nn.Linear(4, 6)
        self.top = nn.Sequential(nn.Linear(6 + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, bags: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        vectors = [self.bottom(dense), *(t(bags[:, i]) for i, t in enumerate(self.tables))]
        z = torch.stack(vectors, 1)
        products = torch.bmm(z, z.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        out = self.top(torch.cat([vectors[0], products[:, rows, columns]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(out, y), out


class Tokens(nn.Module):
    """A language model with a tied head."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.mix(hidden.cumsum(1)).relu()
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 11, (batch, length))


def token_batch(batch: int, length: int = 6) -> tuple[Tensor, Tensor]:
    """Ids, and labels of which some rows have very few."""
    ids = _tokens(batch, length)
    labels = ids.roll(-1, 1)
    labels[torch.rand(labels.shape) < 0.4] = -100
    labels[0, 1:] = -100
    return ids, labels


def _lstm_inputs(batch: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 5, (4, batch))
    y[2:, 0] = -1
    return torch.randn(4, batch, 6), y


BY_HAND: dict[str, tuple[type[nn.Module], Callable[[int], tuple[Tensor, ...]], Any]] = {
    "mlp": (Mlp, lambda n: (torch.randn(n, 6), torch.randint(0, 5, (n,))), None),
    "two_tower": (TwoTower, lambda n: (torch.randn(n, 6), torch.randn(n, 5)), None),
    "lstm": (Lstm, _lstm_inputs, 1),
    "dlrm": (
        Dlrm,
        lambda n: (torch.randn(n, 4), torch.randint(0, 20, (n, 3, 2)), torch.rand(n).round()),
        None,
    ),
    "unet": (UNet, lambda n: tuple(unet_inputs(n).values()), None),
    "tokens": (Tokens, token_batch, None),
}
"""Model, inputs of a global batch, its `batch_dims`."""


def know_by_hand() -> None:
    """Capture them all, for `RankPool.prepare`."""
    torch.set_default_dtype(torch.float64)
    for name, (build, inputs, dims) in BY_HAND.items():
        capture_ahead(name, build(), inputs(4), {}, {"dp": 2}, batch_dims=dims)


def known(name: str) -> contextlib.AbstractContextManager[None]:
    """Inside, that model is captured only where nobody has done so before."""
    return captured_once(KNOWN.setdefault(name, {}))


def part(value: Tensor, split: Sequence[int], rank: int, dim: int = 0) -> Tensor:
    """A rank's samples."""
    return value.split(list(split), dim)[rank]


def loss_of(output: Any) -> Tensor:
    """The loss among what a model returns."""
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"]


@contextlib.contextmanager
def one_seed() -> Any:
    """The same random numbers on all ranks, whatever came before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def worst_error(
    model: nn.Module, output: Any, twin: nn.Module, expected: Any, split: Sequence[int], rank: int
) -> float:
    """The largest relative error among outputs, gradients and buffers of a rank."""
    errors = [0.0]
    got_leaves, spec = pytree.tree_flatten(output)
    leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for got, leaf in zip(got_leaves, leaves, strict=True):
        if isinstance(leaf, Tensor):
            errors.append(difference(got.detach(), _own(leaf.detach(), got.shape, split, rank)))
        else:
            assert got == leaf
    errors += gradient_errors(model, twin)
    for (name, a), (other, b) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert name == other
        errors.append(difference(a, b))
    return max(errors)


def gradient_errors(model: nn.Module, twin: nn.Module) -> list[float]:
    """Relative errors of the gradients; a gradient of zero but for rounding counts against the others."""
    pairs = list(zip(model.named_parameters(), twin.named_parameters(), strict=True))
    norms = [float(b.grad.abs().max()) for _, (_, b) in pairs if b.grad is not None and b.grad.numel()]
    floor = 1e-3 * max(norms, default=0.0)
    errors = []
    for (name, a), (other, b) in pairs:
        assert name == other
        assert (a.grad is None) == (b.grad is None), f"{name}: {a.grad is None=}, {b.grad is None=}"
        if a.grad is not None and b.grad is not None:
            errors.append(difference(a.grad, b.grad, floor))
    return errors


def _own(full: Tensor, shape: torch.Size, split: Sequence[int], rank: int) -> Tensor:
    """The part of a global output that a rank of this shape holds: all of it, or its range of one dim."""
    if full.shape == shape:
        return full
    (dim,) = [d for d, (a, b) in enumerate(zip(full.shape, shape, strict=True)) if a != b]
    inner = full.shape[dim] // sum(split)
    return full.narrow(dim, inner * sum(split[:rank]), inner * split[rank])


def step_both(
    compiled: nn.Module,
    twin: nn.Module,
    full: tuple[tuple[Any, ...], dict[str, Any]],
    dims: Any,
    split: Sequence[int],
    rank: int,
) -> float:
    """One forward and backward of both; the rank's worst error."""
    dim = dims or 0
    args, kwargs = pytree.tree_map(lambda t: part(t, split, rank, dim) if isinstance(t, Tensor) else t, full)
    compiled.zero_grad()
    twin.zero_grad()
    output, expected = compiled(*args, **kwargs), twin(*full[0], **full[1])
    loss_of(output).backward()
    loss_of(expected).backward()
    return worst_error(compiled, output, twin, expected, split, rank)


def counterpart_of(model: nn.Module) -> nn.Module:
    """A copy for the eager reference."""
    return copy.deepcopy(model)
