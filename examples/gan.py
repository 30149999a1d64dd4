"""A generative adversarial network: two networks, two optimizers, noise and labels made in the loop.

    python examples/gan.py
    fxdp run --nproc 2 examples/gan.py

Both print the same numbers: noise is one device's, and both networks get the gradients of the global batch.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)


class Digits(Dataset[Tensor]):
    """Images between -1 and 1, each with a little noise."""

    def __init__(self, count: int) -> None:
        self.images = torch.tensor(load_digits().images[:count] / 8 - 1).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index] + 0.01 * torch.randn(1, 8, 8)


parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=600)
parser.add_argument("--epochs", type=int, default=3)
asked = parser.parse_args()

noise = 8
generator = nn.Sequential(
    nn.ConvTranspose2d(noise, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)  # fmt: skip
criterion = nn.BCELoss()
fixed = torch.randn(6, noise, 1, 1)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
loader = DataLoader(Digits(asked.samples), batch_size=64, shuffle=True)

for epoch in range(asked.epochs):
    for real in loader:
        discriminator.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        error_real = criterion(discriminator(real).view(-1), label)
        error_real.backward()
        fake = generator(torch.randn(real.size(0), noise, 1, 1))
        label.fill_(0.0)
        error_fake = criterion(discriminator(fake.detach()).view(-1), label)
        error_fake.backward()
        optimizer_d.step()

        generator.zero_grad()
        label.fill_(1.0)
        error_g = criterion(discriminator(fake).view(-1), label)
        error_g.backward()
        optimizer_g.step()
    with torch.no_grad():
        ink = generator(fixed).abs().mean().item()
    errors = f"discriminator {(error_real + error_fake).item():.9f}, generator {error_g.item():.9f}"
    print(f"epoch {epoch + 1}: {errors}, samples {ink:.9f}")
