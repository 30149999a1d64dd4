"""What the suite of bits trains: the models of the catalogue, a GAN, packed documents, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from fxdp import Rows
from tests.eager.ragged.test_by_hand import GRAPHS, Convolution, graphs, joined
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.entry import TOKENS, Entry
from tests.zoo.public import WithLoss, inputs_of, own_inputs


@dataclass(frozen=True)
class Subject:
    """A model that returns a loss.

    `inputs` returns those of one rank, from the compiled model, the samples of each rank, the rank, and a
    seed from which alone the global batch is made. `phases` are the submodules that a step trains one after
    the other, each by its own loss of these inputs.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[Any, Sequence[int], int, int], dict[str, Any]]
    batch_dims: Any = None
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Empty: the model is trained by all inputs."""


def subject(name: str) -> Subject:
    """Return one of `OTHERS`, or a model of the catalogue."""
    return OTHERS.get(name) or _of_catalogue(CATALOGUE[name])


def _of_catalogue(entry: Entry) -> Subject:
    def inputs(compiled: Any, parts: Sequence[int], rank: int, seed: int) -> dict[str, Any]:
        dtype = next(compiled.parameters()).dtype
        full = inputs_of(entry, sum(parts), seed=seed)
        full = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, full)
        return own_inputs(compiled, full, parts, rank)

    return Subject(lambda: WithLoss(entry.build()), inputs, entry.batch_dims)


def _samples(parts: Sequence[int], rank: int) -> range:
    first = sum(parts[:rank])
    return range(first, first + parts[rank])


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(6, 128), nn.Unflatten(1, (8, 4, 4)), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        made = self.generator(noise)
        if real is None:
            return F.softplus(-self.discriminator(made)).mean()
        return (F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(made.detach()))).mean()


def _pictures(compiled: Any, parts: Sequence[int], rank: int, seed: int) -> dict[str, Any]:
    made, own = torch.Generator().manual_seed(seed), _samples(parts, rank)
    real = torch.randn(sum(parts), 3, 8, 8, generator=made)
    noise = torch.randn(sum(parts), 6, generator=made)
    return {"real": real[own.start : own.stop].clone(), "noise": noise[own.start : own.stop].clone()}


def _documents(compiled: Any, parts: Sequence[int], rank: int, seed: int) -> dict[str, Any]:
    """Documents of 1 to 6 tokens in one row, without a loss of the first token of each."""
    found = []
    for index in _samples(parts, rank):
        made = torch.Generator().manual_seed(1000 * seed + index)
        length = 1 + int(torch.randint(6, (), generator=made))
        ids = torch.randint(3, TOKENS, (length,), generator=made)
        found.append((ids, torch.cat([torch.tensor([-100]), ids[1:]]), torch.arange(length)))
    ids, labels, positions = (_row(of) for of in zip(*found, strict=True)) if found else [_row([])] * 3
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _row(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *values])[None]


class _Graphs(nn.Module):
    """Two layers with batch statistics over all nodes, and of those above zero a mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.norm, self.second = Convolution(kind), nn.BatchNorm1d(3), Convolution(kind)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        h = self.second(F.relu(self.norm(self.first(x, edge_index))), edge_index)
        pooled = h.new_zeros(len(y), 3).index_add(0, batch, h)
        return F.mse_loss(pooled.sum(1), y) + h[h.sum(1) > 0].square().mean()


def _molecules(compiled: Any, parts: Sequence[int], rank: int, seed: int) -> dict[str, Any]:
    """Graphs of 1 to 5 nodes."""
    own = [graphs(1000 * seed + i, [1 + (5 * i + seed) % 5]) for i in _samples(parts, rank)]
    batch = joined(own) if own else graphs(0, [])
    return {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}


_TOKENS = Rows("tokens", dim=1)
_PACKED = {"input_ids": _TOKENS, "labels": _TOKENS, "position_ids": Rows("tokens", dim=1, within="documents")}

OTHERS = {
    "gan": Subject(_Gan, _pictures, phases={"discriminator": ("noise", "real"), "generator": ("noise",)}),
    "packed_llama": Subject(lambda: WithLoss(CATALOGUE["llama"].build()), _documents, ((), _PACKED)),
    "gcn": Subject(partial(_Graphs, "gcn"), _molecules, ((), GRAPHS)),
    "gat": Subject(partial(_Graphs, "gat"), _molecules, ((), GRAPHS)),
}
"""Trainings of other kinds by name: ragged ones have blocks of documents or graphs."""
