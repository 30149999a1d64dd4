"""A variational autoencoder of digits: noise inside of the model, a loss of two terms, samples at the end.

    python examples/vae.py
    fxdp run --nproc 2 examples/vae.py

Both print the same numbers, the drawn samples included.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)


class VAE(nn.Module):
    """Images of 64 pixels, through a code of five numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(48, 5), nn.Linear(48, 5)
        self.decoder = nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reconstruction, and the code's distribution."""
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=3)
asked = parser.parse_args()

images = torch.tensor(load_digits().data[: asked.samples] / 16)
loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(asked.epochs):
    total = 0.0
    for (x,) in loader:
        y, mean, log_variance = model(x)
        likeness = F.binary_cross_entropy(y, x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        loss = (likeness + divergence) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    print(f"epoch {epoch + 1}: loss {total / len(images):.9f}")
with torch.no_grad():
    print(f"ink of 16 samples: {model.decoder(torch.randn(16, 5)).mean().item():.9f}")
