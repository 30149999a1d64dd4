"""Losses by torch.func: functional calls, gradients per sample by vmap, MAML, Jacobians."""

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(30, 5)
y = torch.sin(x.sum(1, keepdim=True))
loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def compute_loss(params, inputs, targets):
    return F.mse_loss(functional_call(model, params, (inputs,)), targets)


def sample_loss(params, sample, target):
    return compute_loss(params, sample.unsqueeze(0), target.unsqueeze(0))


params = {name: p.detach().clone() for name, p in model.named_parameters()}
for inputs, targets in loader:
    grads, loss = grad_and_value(compute_loss)(params, inputs, targets)
    params = {name: p - 0.1 * grads[name] for name, p in params.items()}
    print(f"functional {loss.item():.10g} {sum(g.norm() for g in grads.values()).item():.10g}")
for inputs, targets in loader:
    each = vmap(grad(sample_loss), in_dims=(None, 0, 0))(params, inputs, targets)
    norms = sum(g.flatten(1).norm(dim=1) ** 2 for g in each.values()).sqrt()
    clipped = {k: (g / norms.clamp(min=1).view(-1, *[1] * (g.dim() - 1))).mean(0) for k, g in each.items()}
    params = {name: p - 0.1 * clipped[name] for name, p in params.items()}
    print(f"per sample {norms.mean().item():.10g} {norms.max().item():.10g}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for inputs, targets in loader:
    support, query = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
    named = dict(model.named_parameters())
    inner = compute_loss(named, support, targets[: len(support)])
    grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
    fast = {k: p - 0.1 * g for (k, p), g in zip(named.items(), grads, strict=True)}
    outer = compute_loss(fast, query, targets[len(support) :])
    optimizer.zero_grad()
    outer.backward()
    optimizer.step()
    print(f"adapted {outer.item():.10g}")
for inputs, _ in loader:
    slopes = vmap(jacrev(lambda row: functional_call(model, params, (row,))))(inputs)
    print(f"slopes {slopes.abs().mean().item():.10g}")
    break
print(f"norms {sum(p.norm() for p in model.parameters()):.10g} {sum(p.norm() for p in params.values()):.10g}")
