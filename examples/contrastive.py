"""Contrastive learning: two views of each digit, and a loss in which each sample sees the entire batch.

    python examples/contrastive.py
    fxdp run --nproc 2 examples/contrastive.py

Both print the same numbers. The similarity matrix is that of the global batch, so more ranks do not mean
fewer negatives, and there is no gather to write.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Each image twice, with noise of its own and a part that is hidden."""

    def __init__(self, count: int) -> None:
        self.images = torch.tensor(load_digits().data[:count] / 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._view(index), self._view(index)

    def _view(self, index: int) -> Tensor:
        image = self.images[index] + 0.1 * torch.randn(64)
        return image * (torch.rand(64) > 0.2)


def info_nce(one: Tensor, two: Tensor) -> Tensor:
    """The loss of naming for each view the other view of its image, among all of the batch."""
    features = F.normalize(torch.cat([one, two]), dim=1)
    similarity = features @ features.T / 0.1
    similarity = similarity.masked_fill(torch.eye(len(features), dtype=torch.bool), float("-inf"))
    target = torch.arange(len(features)).roll(len(one))
    return F.cross_entropy(similarity, target)


parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=3)
asked = parser.parse_args()

loader = DataLoader(Views(asked.samples), batch_size=96, shuffle=True)
encoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3)
for epoch in range(asked.epochs):
    total = 0.0
    for first, second in loader:
        loss = info_nce(encoder(first), encoder(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(first)
    print(f"epoch {epoch + 1}: loss {total / asked.samples:.9f}")
