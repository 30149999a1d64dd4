"""A physics-informed network: residuals by second derivatives, a learned coefficient, Adam, then L-BFGS."""

import numpy as np
import torch
from torch import nn
from torch.autograd import grad
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(1234)
np.random.seed(1234)


class PINN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in zip(layers[:-1], layers[1:], strict=True)])
        self.activation = nn.Tanh()
        self.log_nu = nn.Parameter(torch.tensor(-3.0))
        for linear in self.linears:
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for linear in self.linears[:-1]:
            h = self.activation(linear(h))
        return self.linears[-1](h)

    def residual(self, x, t):
        x.requires_grad = True
        t.requires_grad = True
        u = self(x, t)
        u_t = grad(u, t, torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = grad(u.sum(), x, create_graph=True)[0]
        u_xx = grad(u_x, x, grad_outputs=torch.ones_like(u_x), create_graph=True)[0]
        return u_t + u * u_x - torch.exp(self.log_nu) * u_xx


def latin_hypercube(n):
    cut = np.linspace(0, 1, n + 1)
    u = np.random.rand(n, 2)
    points = cut[:n, None] + u * (1 / n)
    for j in range(2):
        points[:, j] = points[np.random.permutation(n), j]
    return points


lower, upper = np.array([-1.0, 0.0]), np.array([1.0, 1.0])
collocation = torch.tensor(lower + (upper - lower) * latin_hypercube(57))
x0 = torch.linspace(-1, 1, 21).unsqueeze(1)
t0, u0 = torch.zeros_like(x0), -torch.sin(np.pi * x0)
tb = torch.rand(13, 1)
xb = torch.where(torch.rand(13, 1) < 0.5, -1.0, 1.0)
model = PINN([2, 12, 12, 1])
mse = nn.MSELoss()


def total_loss(points):
    x, t = points[:, 0:1], points[:, 1:2]
    physics = model.residual(x.clone(), t.clone())
    return (physics**2).mean() + mse(model(x0, t0), u0) + model(xb, tb).pow(2).mean()


optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
for epoch in range(4):
    for (points,) in DataLoader(TensorDataset(collocation), batch_size=20, shuffle=True):
        optimizer.zero_grad()
        loss = total_loss(points)
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(f"adam {epoch} loss {loss.item():.10g} viscosity {model.log_nu.exp().item():.10g}")
calls = 0
lbfgs = torch.optim.LBFGS(
    model.parameters(),
    lr=1.0,
    max_iter=8,
    history_size=10,
    tolerance_grad=1e-9,
    line_search_fn="strong_wolfe",
)
batch = next(iter(DataLoader(TensorDataset(collocation), batch_size=len(collocation))))[0]


def closure():
    global calls
    lbfgs.zero_grad()
    loss = total_loss(batch)
    loss.backward()
    calls += 1
    if calls % 5 == 0:
        print(f"  call {calls} loss {loss.item():.8g}")
    return loss


for step in range(2):
    loss = lbfgs.step(closure)
    print(f"lbfgs {step} loss {loss.item():.8g}, {calls} calls")
model.eval()
xx, tt = np.meshgrid(np.linspace(-1, 1, 9), np.linspace(0, 1, 5))
with torch.no_grad():
    u = model(torch.from_numpy(xx.reshape(-1, 1)), torch.from_numpy(tt.reshape(-1, 1))).numpy()
exact = -np.sin(np.pi * xx) * np.exp(-tt)
print(f"relative error {np.linalg.norm(exact.ravel() - u.ravel()) / np.linalg.norm(exact):.8g}")
