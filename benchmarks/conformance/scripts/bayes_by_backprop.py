"""Weights as distributions: the KL of their draws, several draws per batch, MC dropout, calibration in bins."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)


class Gaussian:
    def __init__(self, mu, rho):
        self.mu, self.rho = mu, rho
        self.normal = torch.distributions.Normal(0, 1)

    @property
    def sigma(self):
        return torch.log1p(torch.exp(self.rho))

    def sample(self):
        return self.mu + self.sigma * self.normal.sample(self.rho.size())

    def log_prob(self, input):
        return (
            -math.log(math.sqrt(2 * math.pi))
            - torch.log(self.sigma)
            - ((input - self.mu) ** 2) / (2 * self.sigma**2)
        ).sum()


class ScaleMixture:
    def __init__(self, pi, sigma1, sigma2):
        self.pi = pi
        self.gaussian1, self.gaussian2 = (
            torch.distributions.Normal(0, sigma1),
            torch.distributions.Normal(0, sigma2),
        )

    def log_prob(self, input):
        prob1, prob2 = torch.exp(self.gaussian1.log_prob(input)), torch.exp(self.gaussian2.log_prob(input))
        return torch.log(self.pi * prob1 + (1 - self.pi) * prob2).sum()


class BayesianLinear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features).uniform_(-0.2, 0.2))
        self.weight_rho = nn.Parameter(torch.empty(out_features, in_features).uniform_(-4, -3))
        self.weight = Gaussian(self.weight_mu, self.weight_rho)
        self.bias_mu = nn.Parameter(torch.empty(out_features).uniform_(-0.2, 0.2))
        self.bias_rho = nn.Parameter(torch.empty(out_features).uniform_(-4, -3))
        self.bias = Gaussian(self.bias_mu, self.bias_rho)
        self.prior = ScaleMixture(0.5, math.exp(-0), math.exp(-6))
        self.log_prior = self.log_posterior = 0

    def forward(self, input, sample=False):
        if self.training or sample:
            weight, bias = self.weight.sample(), self.bias.sample()
        else:
            weight, bias = self.weight.mu, self.bias.mu
        if self.training:
            self.log_prior = self.prior.log_prob(weight) + self.prior.log_prob(bias)
            self.log_posterior = self.weight.log_prob(weight) + self.bias.log_prob(bias)
        return F.linear(input, weight, bias)


class BayesianNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = BayesianLinear(8, 14), BayesianLinear(14, 3)

    def forward(self, x, sample=False):
        return F.log_softmax(self.l2(F.relu(self.l1(x.view(-1, 8), sample)), sample), dim=1)

    def sample_elbo(self, input, target, samples, batches):
        outputs = torch.zeros(samples, input.shape[0], 3)
        priors, posteriors = torch.zeros(samples), torch.zeros(samples)
        for i in range(samples):
            outputs[i] = self(input, sample=True)
            priors[i] = self.l1.log_prior + self.l2.log_prior
            posteriors[i] = self.l1.log_posterior + self.l2.log_posterior
        log_prior, log_posterior = priors.mean(), posteriors.mean()
        nll = F.nll_loss(outputs.mean(0), target, reduction="sum")
        return (log_posterior - log_prior) / batches + nll, log_prior, log_posterior, nll


class VariationalDropout(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.log_sigma2 = nn.Parameter(torch.full_like(self.weight, -8.0))

    def forward(self, x):
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        mean = F.linear(x, self.weight, self.bias)
        std = torch.sqrt(F.linear(x * x, torch.exp(self.log_sigma2)) + 1e-8)
        return mean + std * torch.randn_like(std)

    def kl(self):
        log_alpha = (self.log_sigma2 - torch.log(self.weight**2 + 1e-8)).clamp(-8, 8)
        return -(
            0.63576 * torch.sigmoid(1.8732 + 1.48695 * log_alpha) - 0.5 * F.softplus(-log_alpha) - 0.63576
        ).sum()


def calibration_error(confidences, hits, bins=5):
    edges = torch.linspace(0, 1, bins + 1)
    where = torch.bucketize(confidences, edges[1:-1])
    count = torch.bincount(where, minlength=bins)
    accuracy = torch.zeros(bins).scatter_add_(0, where, hits.double()) / count.clamp(min=1)
    confidence = torch.zeros(bins).index_add_(0, where, confidences) / count.clamp(min=1)
    return ((accuracy - confidence).abs() * count / count.sum()).sum(), torch.histc(confidences, bins, 0, 1)


x = torch.randn(65, 2, 4)
y = x.sum(-1).argmax(1) + (x.mean((1, 2)) > 0.3).long()
train, test = (
    DataLoader(TensorDataset(x[:44], y[:44]), 10, shuffle=True),
    DataLoader(TensorDataset(x[44:], y[44:]), 8),
)
net = BayesianNetwork()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(3):
    net.train()
    for data, target in train:
        net.zero_grad()
        loss, log_prior, log_posterior, nll = net.sample_elbo(data, target, 3, len(train))
        loss.backward()
        optimizer.step()
    print(
        f"{epoch} loss {loss.item():.10g} prior {log_prior.item():.10g} posterior {log_posterior.item():.10g} nll {nll.item():.10g}"
    )
net.eval()
corrects = torch.zeros(4, dtype=torch.long)
with torch.no_grad():
    for data, target in test:
        outputs = torch.zeros(4, len(target), 3)
        for i in range(3):
            outputs[i] = net(data, sample=True)
        outputs[3] = net(data, sample=False)
        preds = outputs.max(2, keepdim=True)[1]
        corrects += preds.eq(target.view_as(outputs.mean(0).max(1, keepdim=True)[1])).sum(dim=1).squeeze()
print(f"correct {corrects.tolist()} of {len(test.dataset)}")
dropped = nn.Sequential(
    nn.Flatten(), VariationalDropout(8, 14), nn.ReLU(), nn.Dropout(0.4), VariationalDropout(14, 3)
)
optimizer = torch.optim.Adam(dropped.parameters(), lr=1e-2)
for epoch in range(3):
    for data, target in train:
        kl = sum(m.kl() for m in dropped.modules() if hasattr(m, "kl"))
        loss = F.cross_entropy(dropped(data), target) * len(train.dataset) + min(1.0, epoch / 2) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{epoch} loss {loss.item():.10g} kl {kl.item():.10g}")
dropped.eval()
for m in dropped.modules():
    if m.__class__.__name__.startswith("Dropout"):
        m.train()
confidences, hits = [], []
with torch.no_grad():
    for data, target in test:
        draws = torch.stack([dropped(data).softmax(-1) for _ in range(5)])
        mean, spread = draws.mean(0), draws.std(0)
        confidence, prediction = mean.max(-1)
        confidences.append(confidence), hits.append(prediction.eq(target))
        entropy = -(mean * mean.log()).sum(-1)
        mutual = entropy + (draws * draws.log()).sum(-1).mean(0)
        print(
            f"spread {spread.mean().item():.10g} entropy {entropy.mean().item():.10g} mutual {mutual.max().item():.10g}"
        )
ece, histogram = calibration_error(torch.cat(confidences), torch.cat(hits))
print(f"calibration {ece.item():.10g} histogram {histogram.int().tolist()}")
