"""Regression by a Kolmogorov-Arnold network, with a penalty of its coefficients, and LBFGS."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class KANLayer(nn.Module):
    """A sum of learned one-dimensional functions for each output."""

    def __init__(self, in_features, out_features, grids=6):
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, grids))
        self.spline_weight = nn.Parameter(0.1 * torch.randn(out_features, in_features, grids))
        self.base_weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.base_weight)

    def forward(self, x):
        bases = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        spline = torch.einsum("big,oig->bo", bases, self.spline_weight)
        return F.linear(F.silu(x), self.base_weight) + spline

    def regularization(self):
        l1 = self.spline_weight.abs().mean(-1)
        p = l1 / l1.sum()
        return l1.sum() - torch.sum(p * p.log())


class KAN(nn.Sequential):
    def __init__(self, *widths):
        super().__init__(*(KANLayer(i, o) for i, o in zip(widths, widths[1:], strict=False)))

    def regularization(self):
        return sum(layer.regularization() for layer in self)


def target(x):
    return torch.exp(torch.sin(torch.pi * x[:, [0]]) + x[:, [1]] ** 2)


x = torch.rand(57, 2) * 2 - 1
train_loader = DataLoader(TensorDataset(x[:37], target(x[:37])), batch_size=12, shuffle=True)
test_input, test_label = next(iter(DataLoader(TensorDataset(x[37:], target(x[37:])), batch_size=20)))
model = KAN(2, 4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
for epoch in range(4):
    model.train()
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), labels) + 1e-3 * model.regularization()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        test_loss = torch.sqrt(torch.mean((model(test_input) - test_label) ** 2))
    scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.10g} rmse {test_loss.item():.10g}")

batch = next(iter(DataLoader(TensorDataset(x[:37], target(x[:37])), batch_size=37)))
lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
for step in range(3):

    def closure():
        lbfgs.zero_grad()
        objective = F.mse_loss(model(batch[0]), batch[1])
        objective.backward()
        return objective

    print(f"lbfgs {step} loss {lbfgs.step(closure).item():.10g}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
