"""Gaussian processes: exact by Cholesky and L-BFGS, sparse variational in batches, a deep kernel, Bayesian optimization."""

import math

import torch
from scipy.optimize import minimize
from scipy.stats import norm, spearmanr
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(23)


class RBF(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.raw_scales = nn.Parameter(torch.zeros(dims))
        self.raw_variance = nn.Parameter(torch.tensor(0.5))

    def forward(self, a, b):
        scales = nn.functional.softplus(self.raw_scales)
        return nn.functional.softplus(self.raw_variance) * torch.exp(-0.5 * torch.cdist(a / scales, b / scales) ** 2)


class ExactGP(nn.Module):
    def __init__(self, x, y, feature=None):
        super().__init__()
        self.feature = feature or nn.Identity()
        self.kernel = RBF(self.feature(x[:1]).shape[1])
        self.raw_noise = nn.Parameter(torch.tensor(-2.0))
        self.mean = nn.Parameter(torch.zeros(()))
        self.x, self.y = x, y

    def nll(self):
        z = self.feature(self.x)
        covariance = self.kernel(z, z) + nn.functional.softplus(self.raw_noise) * torch.eye(len(z))
        self.factor = torch.linalg.cholesky(covariance)
        residual = (self.y - self.mean).unsqueeze(1)
        self.alpha = torch.cholesky_solve(residual, self.factor)
        log_det = 2 * self.factor.diagonal().log().sum()
        return 0.5 * ((residual * self.alpha).sum() + log_det + len(z) * math.log(2 * math.pi)) / len(z)

    @torch.no_grad()
    def predict(self, new):
        cross = self.kernel(self.feature(new), self.feature(self.x))
        solved = torch.linalg.solve_triangular(self.factor, cross.T, upper=False)
        prior = self.kernel(new[:1] * 0, new[:1] * 0) if isinstance(self.feature, nn.Identity) else self.kernel.raw_variance
        return self.mean + (cross @ self.alpha).squeeze(1), (prior.reshape(()).abs() - (solved**2).sum(0)).clamp(min=1e-9)


class SVGP(nn.Module):
    def __init__(self, inducing, count):
        super().__init__()
        self.count, self.kernel = count, RBF(inducing.shape[1])
        self.inducing = nn.Parameter(inducing.clone())
        self.q_mean = nn.Parameter(torch.zeros(len(inducing), 1))
        self.q_root = nn.Parameter(torch.eye(len(inducing)))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def conditional(self, x):
        k = self.kernel(self.inducing, self.inducing) + 1e-6 * torch.eye(len(self.inducing))
        chol = torch.linalg.cholesky(k)
        a = torch.linalg.solve_triangular(chol, self.kernel(self.inducing, x), upper=False)
        root = torch.tril(self.q_root)
        mean = (a.T @ self.q_mean).squeeze(1)
        variance = nn.functional.softplus(self.kernel.raw_variance) - (a**2).sum(0) + ((root.T @ a) ** 2).sum(0)
        return mean, variance

    def elbo(self, x, y):
        mean, variance = self.conditional(x)
        q = torch.distributions.MultivariateNormal(self.q_mean.squeeze(1), scale_tril=torch.tril(self.q_root))
        p = torch.distributions.MultivariateNormal(torch.zeros(len(self.inducing)), torch.eye(len(self.inducing)))
        noise = self.log_noise.exp()
        fit = -0.5 * (math.log(2 * math.pi) + self.log_noise + ((y - mean) ** 2 + variance) / noise)
        return fit.mean() - torch.distributions.kl_divergence(q, p) / self.count


def target(x):
    return torch.sin(3 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + 0.1 * torch.randn(len(x))


x = torch.rand(61, 2) * 2 - 1
y = target(x)
loader = DataLoader(TensorDataset(x, y), batch_size=22, shuffle=True)
new, truth = torch.rand(15, 2) * 2 - 1, None
truth = torch.sin(3 * new[:, 0]) + 0.5 * new[:, 1] ** 2

bx, by = next(iter(loader))
gp = ExactGP(bx, by)
optimizer = torch.optim.LBFGS(gp.parameters(), lr=0.3, max_iter=6, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = gp.nll()
    loss.backward()
    return loss


for step in range(2):
    print(f"exact {step} {optimizer.step(closure).item():.10g}")
gp.nll()
mean, variance = gp.predict(new)
print(f"rmse {(mean - truth).pow(2).mean().sqrt().item():.10g} deviation {variance.sqrt().mean().item():.10g}")
print(f"rank correlation {spearmanr(mean.numpy(), truth.numpy()).statistic:.10g}")

svgp = SVGP(x[torch.randperm(len(x))[:9]], len(x))
optimizer = torch.optim.Adam(svgp.parameters(), lr=0.03)
for epoch in range(3):
    total = 0.0
    for a, b in loader:
        optimizer.zero_grad()
        loss = -svgp.elbo(a, b)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(a)
    print(f"sparse {epoch} {total / len(x):.10g} noise {svgp.log_noise.exp().item():.10g}")
with torch.no_grad():
    scores = [((svgp.conditional(a)[0] - b) ** 2).sum() for a, b in loader]
    print(f"sparse rmse {(torch.stack(scores).sum() / len(x)).sqrt().item():.10g}")

deep = ExactGP(bx, by, nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)))
optimizer = torch.optim.AdamW([{"params": deep.feature.parameters(), "weight_decay": 1e-3}, {"params": [*deep.kernel.parameters(), deep.raw_noise]}], lr=0.02)
for step in range(4):
    optimizer.zero_grad()
    loss = deep.nll()
    loss.backward()
    optimizer.step()
    print(f"deep {step} {loss.item():.10g} mean gradient {deep.mean.grad.item():.10g}")
    deep.zero_grad(set_to_none=False)

flat = nn.utils.parameters_to_vector(gp.parameters()).detach().numpy()


def objective(vector):
    nn.utils.vector_to_parameters(torch.from_numpy(vector), gp.parameters())
    gp.zero_grad()
    loss = gp.nll()
    loss.backward()
    return loss.item(), torch.cat([p.grad.reshape(-1) for p in gp.parameters()]).numpy()


found = minimize(objective, flat, jac=True, method="L-BFGS-B", options={"maxiter": 4})
print(f"scipy {found.fun:.8g} of {len(found.x)}")
for round_ in range(3):
    gp.nll()
    candidates = torch.rand(25, 2) * 2 - 1
    mean, variance = gp.predict(candidates)
    best = gp.y.max().item()
    z = (mean.numpy() - best) / variance.sqrt().numpy()
    improvement = (mean.numpy() - best) * norm.cdf(z) + variance.sqrt().numpy() * norm.pdf(z)
    pick = candidates[int(improvement.argmax())].unsqueeze(0)
    gp.x, gp.y = torch.cat([gp.x, pick]), torch.cat([gp.y, target(pick)])
    print(f"round {round_} best {gp.y.max().item():.10g} of {len(gp.x)} expected {improvement.max():.8g}")
