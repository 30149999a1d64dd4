"""A residual network with BatchNorm on handwritten digits, written for one device.

    python examples/resnet.py
    fxdp run --nproc 2 examples/resnet.py

Both print the same numbers: BatchNorm normalizes by the global batch, the last batch does not divide, and the
count of right answers is that of all ranks. The data set shifts each image at random, as on one device.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)  # so that rounding is below what is printed
torch.manual_seed(0)


class Digits(Dataset[tuple[Tensor, int]]):
    """Images of 8x8, shifted by up to one pixel in training."""

    def __init__(self, first: int, last: int, shifted: bool) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[first:last] / 16).unsqueeze(1)
        self.labels, self.shifted = digits.target[first:last].tolist(), shifted

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.shifted:
            top, left = torch.randint(3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return image, self.labels[index]


class Block(nn.Module):
    """Two convolutions, and a way past them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.past = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """The features of the next block."""
        return F.relu(self.body(x) + self.past(x))


parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=1200)
parser.add_argument("--epochs", type=int, default=4)
asked = parser.parse_args()

train = DataLoader(Digits(0, asked.samples, shifted=True), batch_size=32, shuffle=True)
test = DataLoader(Digits(1400, 1400 + min(asked.samples, 300), shifted=False), batch_size=100)
model = nn.Sequential(
    Block(1, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, asked.epochs)

for epoch in range(asked.epochs):
    model.train()
    total = 0.0
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(images)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test)
    print(f"epoch {epoch + 1}: loss {total / len(train.dataset):.9f}, {right} of {len(test.dataset)} right")
