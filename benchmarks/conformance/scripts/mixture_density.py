"""Densities and quantiles: a mixture density network, pinball losses, intervals conformed by NumPy."""

import numpy as np
import torch
import torch.distributions as D
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(17)
rng = np.random.default_rng(17)


class MDN(nn.Module):
    def __init__(self, n_hidden=12, n_gaussians=3):
        super().__init__()
        self.z_h = nn.Sequential(nn.Linear(1, n_hidden), nn.Tanh())
        self.z_pi, self.z_mu = nn.Linear(n_hidden, n_gaussians), nn.Linear(n_hidden, n_gaussians)
        self.z_sigma = nn.Linear(n_hidden, n_gaussians)

    def forward(self, x):
        z_h = self.z_h(x)
        return self.z_pi(z_h).softmax(-1), torch.exp(self.z_sigma(z_h)), self.z_mu(z_h)

    def distribution(self, x):
        pi, sigma, mu = self(x)
        return D.MixtureSameFamily(D.Categorical(pi), D.Normal(mu, sigma))


class Quantiles(nn.Module):
    def __init__(self, quantiles):
        super().__init__()
        self.quantiles = quantiles
        self.net = nn.Sequential(
            nn.Linear(1, 16), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(16, len(quantiles))
        )

    def forward(self, x):
        return self.net(x)

    def pinball(self, preds, target):
        losses = []
        for i, q in enumerate(self.quantiles):
            errors = target - preds[:, i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
        return torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))


y = rng.uniform(-6, 6, 77)
x = 0.75 * np.sin(y) + 0.3 * y + rng.standard_normal(77) * 0.3
x, y = torch.as_tensor(x).view(-1, 1), torch.as_tensor(y)
train = DataLoader(TensorDataset(x[:50], y[:50]), batch_size=12, shuffle=True)
rest = DataLoader(TensorDataset(x[50:], y[50:]), batch_size=10)
mdn, quantiles = MDN(), Quantiles([0.05, 0.5, 0.95])
optimizer = torch.optim.Adam([*mdn.parameters(), *quantiles.parameters()], lr=2e-2)
for epoch in range(4):
    for inputs, targets in train:
        pi, sigma, mu = mdn(inputs)
        by_hand = -torch.logsumexp(
            torch.log(pi) + D.Normal(mu, sigma).log_prob(targets.unsqueeze(1).expand_as(mu)), dim=1
        ).mean()
        by_torch = -mdn.distribution(inputs).log_prob(targets).mean()
        pinball = quantiles.pinball(quantiles(inputs), targets)
        loss = 0.5 * (by_hand + by_torch) + pinball
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{epoch} density {by_hand.item():.10g} {by_torch.item():.10g} pinball {pinball.item():.10g}")
mdn.eval(), quantiles.eval()
draws, scores, inside, dispersion = [], [], 0, []
with torch.no_grad():
    for inputs, targets in rest:
        found = mdn.distribution(inputs)
        samples = found.sample((7,))
        draws.append(samples.numpy())
        dispersion.append((samples - targets).abs().mean() - 0.5 * (samples[1:] - samples[:-1]).abs().mean())
        pi, sigma, mu = mdn(inputs)
        k = torch.multinomial(pi, 1).view(-1)
        drawn = mu.gather(1, k.view(-1, 1)).squeeze(1) + torch.randn(len(mu)) * sigma.gather(
            1, k.view(-1, 1)
        ).view(-1)
        low, mid, high = quantiles(inputs).unbind(1)
        scores.extend(torch.maximum(low - targets, targets - high).tolist())
        inside += ((low <= targets) & (targets <= high)).sum().item()
        print(
            f"median {torch.median(mid).item():.10g} quantile {torch.quantile(drawn, 0.25).item():.10g} "
            f"entropy {D.Categorical(pi).entropy().mean().item():.10g} "
            f"divergence {D.kl_divergence(D.Normal(mu, sigma), D.Normal(0.0, 1.0)).sum(1).mean().item():.10g}"
        )
print(f"samples {np.concatenate(draws, 1).mean():.10g} crps {torch.stack(dispersion).mean().item():.10g}")
print(
    f"inside {inside} of {len(scores)}, conformed by {np.quantile(scores, 0.9):.10g}, {np.percentile(scores, 10):.10g}"
)
