"""Handwritten digits with BatchNorm: the same curve alone and on any number of ranks.

    python examples/train_mlp.py
    torchrun --nproc-per-node 2 examples/train_mlp.py

The batches are those of one device: 1,438 images in batches of 100, the last of 38, each cut into the
ranks' parts, of equal size or not. BatchNorm sees the global batch, and the loss is that of the global batch.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fxdp


def make_model() -> nn.Module:
    """A classifier for images of 8x8; the seed makes it the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and digits to train on, then those to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5 + 1], order[len(order) * 4 // 5 + 1 :]
    return images[train], labels[train], images[test], labels[test]


def main() -> None:
    """Train, and print the loss of each epoch and the accuracy at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    asked = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    images, labels, test_images, test_labels = load()
    model = make_model()
    compiled = fxdp.compile(model, loss_fn=F.cross_entropy, backend=asked.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(asked.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for batch in order.split(100):
            mine = batch.tensor_split(ranks)[rank]
            loss = compiled(images[mine], target=labels[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(batch)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(images):.6f}")
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {right:.3f}")


if __name__ == "__main__":
    main()
