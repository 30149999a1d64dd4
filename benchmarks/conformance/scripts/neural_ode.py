"""A neural differential equation: adjoint method as an autograd function, running averages."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


def rk4(func, t, dt, y):
    k1 = func(t, y)
    k2 = func(t + dt / 2, y + dt * k1 / 2)
    k3 = func(t + dt / 2, y + dt * k2 / 2)
    k4 = func(t + dt, y + dt * k3)
    return y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6


class OdeintAdjoint(torch.autograd.Function):
    """Integrates forward without a graph, and the adjoint equation backward."""

    @staticmethod
    def forward(ctx, func, y0, t, *params):
        ctx.func = func
        with torch.no_grad():
            ys = [y0]
            for i in range(len(t) - 1):
                ys.append(rk4(func, t[i], t[i + 1] - t[i], ys[-1]))
            y = torch.stack(ys)
        ctx.save_for_backward(t, y, *params)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        t, y, *params = ctx.saved_tensors
        adj_y, adj_params = grad_y[-1], [torch.zeros_like(p) for p in params]
        for i in range(len(t) - 1, 0, -1):
            with torch.enable_grad():
                state = y[i - 1].detach().requires_grad_(True)
                after = rk4(ctx.func, t[i - 1], t[i] - t[i - 1], state)
                grads = torch.autograd.grad(after, (state, *params), adj_y, allow_unused=True)
            adj_y = grads[0] + grad_y[i - 1]
            adj_params = [a + g for a, g in zip(adj_params, grads[1:], strict=True)]
        return (None, adj_y, None, *adj_params)


def odeint_adjoint(func, y0, t):
    return OdeintAdjoint.apply(func, y0, t, *func.parameters())


true_t = torch.linspace(0.0, 4.0, 40)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
true_y = [torch.tensor([[2.0, 0.0]])]
with torch.no_grad():
    for step in range(39):
        true_y.append(rk4(lambda t, y: torch.mm(y**3, true_A), true_t[step], true_t[1], true_y[-1]))
true_y = torch.stack(true_y)


class Pieces(Dataset):
    def __len__(self):
        return 33

    def __getitem__(self, i):
        return true_y[i, 0], true_y[i : i + 6, 0]


class RunningAverageMeter:
    def __init__(self, momentum=0.9):
        self.momentum, self.val, self.avg = momentum, None, 0

    def update(self, val):
        self.avg = val if self.val is None else self.avg * self.momentum + val * (1 - self.momentum)
        self.val = val


func = ODEFunc()
optimizer = optim.RMSprop(func.parameters(), lr=1e-3)
loss_meter = RunningAverageMeter()
loader = DataLoader(Pieces(), batch_size=8, shuffle=True)
for epoch in range(2):
    for batch_y0, batch_y in loader:
        optimizer.zero_grad()
        pred_y = odeint_adjoint(func, batch_y0, true_t[:6])
        loss = torch.mean(torch.abs(pred_y - batch_y.transpose(0, 1)))
        loss.backward()
        optimizer.step()
        loss_meter.update(loss.item())
        print(f"loss {loss.item():.10g} mean {loss_meter.avg:.10g}")
    with torch.no_grad():
        pred_y = odeint_adjoint(func, true_y[0], true_t)
        print(f"Iter {epoch:04d} | Total Loss {torch.mean(torch.abs(pred_y - true_y)).item():.10g}")
print(f"norms {sum(p.norm() for p in func.parameters()):.10g}")
