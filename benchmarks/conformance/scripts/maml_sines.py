"""MAML of sine waves: inner steps by torch.func over tasks at once, and a loop over tasks with fast weights."""

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(33)
SHOTS, INNER = 5, 0.05


class Sines(IterableDataset):
    """Tasks: points of a sine wave of some amplitude and phase."""

    def __init__(self, tasks):
        self.tasks = tasks

    def __iter__(self):
        for _ in range(self.tasks):
            amplitude, phase = torch.rand(1) * 4 + 0.5, torch.rand(1) * 3
            x = torch.rand(2 * SHOTS, 1) * 10 - 5
            y = amplitude * torch.sin(x - phase)
            yield {"support": (x[:SHOTS], y[:SHOTS]), "query": (x[SHOTS:], y[SHOTS:])}


net = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(params, x, y):
    return F.mse_loss(functional_call(net, params, (x,)), y)


def adapted(params, x, y, steps=2):
    for _ in range(steps):
        grads = grad(loss_of)(params, x, y)
        params = {name: p - INNER * grads[name] for name, p in params.items()}
    return params


def task_loss(params, x, y, x_query, y_query):
    return loss_of(adapted(params, x, y), x_query, y_query)


loader = DataLoader(Sines(22), batch_size=5)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(2):
    for batch in loader:
        params = dict(net.named_parameters())
        losses = vmap(task_loss, in_dims=(None, 0, 0, 0, 0))(params, *batch["support"], *batch["query"])
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{epoch} tasks {len(losses)} loss {loss.item():.10g} worst {losses.max().item():.10g}")
for batch in loader:
    (x, y), (x_query, y_query) = batch["support"], batch["query"]
    meta_loss = torch.tensor(0.0)
    for i in range(x.size(0)):
        fast = dict(net.named_parameters())
        for _ in range(2):
            inner = F.mse_loss(functional_call(net, fast, (x[i],)), y[i])
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {n: w - INNER * g for (n, w), g in zip(fast.items(), grads, strict=True)}
        meta_loss = meta_loss + F.mse_loss(functional_call(net, fast, (x_query[i],)), y_query[i])
    meta_loss = meta_loss / x.size(0)
    net.zero_grad()
    meta_loss.backward()
    optimizer.step()
    print(f"loop loss {meta_loss.item():.10g} gradient {net[0].weight.grad.norm().item():.10g}")
ensemble = [nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)]
params, buffers = stack_module_state(ensemble)
params = {k: v.detach().requires_grad_() for k, v in params.items()}
optimizer = torch.optim.SGD(params.values(), lr=0.02)


def member(p, b, x):
    return functional_call(ensemble[0], (p, b), (x,))


for batch in loader:
    x, y = (t.flatten(0, 1) for t in batch["query"])
    outputs = vmap(member, in_dims=(0, 0, None), randomness="different")(params, buffers, x)
    loss = (outputs - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"ensemble {loss.item():.10g} spread {outputs.detach().var(0).mean().item():.10g}")
print(f"norms {sum(p.norm() for p in net.parameters()):.10g}")
