"""VAEs by torch.distributions: importance-weighted bounds, a mixture prior, beta schedules, discrete latents by VIMCO."""

import math
from pathlib import Path

import torch
import torch.distributions as D
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(40)
torch.distributions.Distribution.set_default_validate_args(True)


class Encoder(nn.Module):
    def __init__(self, latent=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 14), nn.Tanh())
        self.loc, self.scale = nn.Linear(14, latent), nn.Linear(14, latent)

    def forward(self, x):
        h = self.body(x)
        return D.Independent(D.Normal(self.loc(h), nn.functional.softplus(self.scale(h)) + 1e-4), 1)


class Decoder(nn.Module):
    def __init__(self, latent=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, 14), nn.Tanh(), nn.Linear(14, 16))

    def forward(self, z):
        return D.Independent(D.Bernoulli(logits=self.net(z)), 1)


class VAE(nn.Module):
    def __init__(self, latent=3, parts=4):
        super().__init__()
        self.encoder, self.decoder = Encoder(latent), Decoder(latent)
        self.logits = nn.Parameter(torch.zeros(parts))
        self.means = nn.Parameter(torch.randn(parts, latent))
        self.log_scales = nn.Parameter(torch.zeros(parts, latent))

    @property
    def prior(self):
        parts = D.Independent(D.Normal(self.means, self.log_scales.exp()), 1)
        return D.MixtureSameFamily(D.Categorical(logits=self.logits), parts)

    def log_weights(self, x, k):
        q = self.encoder(x)
        z = q.rsample((k,))
        return self.decoder(z).log_prob(x) + self.prior.log_prob(z) - q.log_prob(z)

    def elbo(self, x, beta=1.0):
        q = self.encoder(x)
        z = q.rsample()
        kl = q.log_prob(z) - self.prior.log_prob(z)
        return self.decoder(z).log_prob(x) - beta * kl, kl

    def iwae(self, x, k):
        return torch.logsumexp(self.log_weights(x, k), dim=0) - math.log(k)


def vimco(encoder, decoder, prior, x, k):
    q = D.Independent(D.Bernoulli(logits=encoder(x)), 1)
    z = q.sample((k,))
    log_q = q.log_prob(z)
    log_w = decoder(z).log_prob(x) + prior.log_prob(z) - log_q
    bound = torch.logsumexp(log_w, 0) - math.log(k)
    others = (log_w.sum(0, keepdim=True) - log_w) / (k - 1)
    replaced = log_w.unsqueeze(0).repeat(k, 1, 1)
    replaced[torch.arange(k), torch.arange(k)] = others
    baseline = torch.logsumexp(replaced, dim=1) - math.log(k)
    signal = (bound.unsqueeze(0) - baseline).detach()
    weights = torch.softmax(log_w, 0).detach()
    surrogate = (signal * log_q).sum(0) + (weights * log_w).sum(0)
    return bound.mean(), -surrogate.mean()


templates = (torch.rand(5, 16) > 0.5).double()
flips = D.Bernoulli(0.1).sample((57, 16))
x = (templates[torch.randint(5, (57,))] - flips).abs()
train, test = DataLoader(TensorDataset(x[:41]), 9, shuffle=True), DataLoader(TensorDataset(x[41:]), 6)
model = VAE()
optimizer = torch.optim.Adam(
    [{"params": model.encoder.parameters()}, {"params": model.decoder.parameters(), "lr": 2e-2},
     {"params": [model.logits, model.means, model.log_scales], "lr": 5e-3}], lr=1e-2, eps=1e-4, fused=False,
)  # fmt: skip
step = 0
for epoch in range(3):
    for (batch,) in train:
        beta = min(1.0, step / 8)
        if epoch < 2:
            elbo, kl = model.elbo(batch, beta)
            loss = -elbo.mean()
        else:
            loss, kl = -model.iwae(batch, 5).mean(), torch.zeros(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 4 == 0:
            print(f"step {step} beta {beta:g} loss {loss.item():.10g} kl {kl.mean().item():.10g}")
    with torch.no_grad():
        bounds = {k: sum(model.iwae(b, k).sum().item() for (b,) in test) / 16 for k in (1, 5, 20)}
        active = torch.cat([model.encoder(b).mean for (b,) in test]).var(0)
    print(f"epoch {epoch}", " ".join(f"k={k} {v:.10g}" for k, v in bounds.items()), "active", int((active > 0.01).sum()))
Path("prior.txt").write_text(str(model.prior))
with torch.no_grad():
    z = model.prior.sample((7,))
    print(f"samples {model.decoder(z).mean.mean().item():.10g}", model.decoder(z).sample().sum().item(), len(Path("prior.txt").read_text()) > 9)
    q = model.encoder(x[:6])
    standard = D.Independent(D.Normal(torch.zeros(3), torch.ones(3)), 1)
    print(f"kl {D.kl_divergence(q, standard.expand((6,))).mean().item():.10g} entropy {q.entropy().sum().item():.10g}")
sender, receiver = nn.Linear(16, 6), nn.Sequential(nn.Linear(6, 12), nn.ELU(), nn.Linear(12, 16))
prior_logits = nn.Parameter(torch.zeros(6))
optimizer = torch.optim.Adagrad([*sender.parameters(), *receiver.parameters(), prior_logits], lr=0.1)
for epoch in range(2):
    for (batch,) in train:
        bound, loss = vimco(sender, lambda z: D.Independent(D.Bernoulli(logits=receiver(z)), 1), D.Independent(D.Bernoulli(logits=prior_logits), 1), batch, 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"vimco {epoch} {bound.item():.10g} {loss.item():.10g}")
beta = D.TransformedDistribution(D.Beta(torch.tensor([2.0, 3.0]), torch.tensor([1.5, 0.7])), [D.AffineTransform(-1.0, 2.0)])
for (batch,) in test:
    angles = beta.rsample((len(batch),))
    gamma = D.Gamma(batch.sum(1) + 1, 2.0).rsample()
    print(f"beta {beta.log_prob(angles).mean().item():.10g} gamma {gamma.mean().item():.10g}")
print(f"norms {sum(p.norm().item() for p in model.parameters()):.10g}")
