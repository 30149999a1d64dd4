"""Ensembles by stack_module_state and vmap, gradients per sample with clipping and noise, Hessians, Laplace, evolution."""

import copy
import math

import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(61)
x = torch.randn(49, 5)
y = torch.sin(x @ torch.randn(5)) + 0.1 * torch.randn(49)
train = DataLoader(TensorDataset(x[:35], y[:35]), batch_size=8, shuffle=True)
test = DataLoader(TensorDataset(x[35:], y[35:]), batch_size=6)


def make(width=7):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


class Ensemble(nn.Module):
    def __init__(self, count):
        super().__init__()
        models = [make() for _ in range(count)]
        params, buffers = stack_module_state(models)
        self.stacked = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in params.items()})
        self.names, self.buffers_, self.count = list(params), buffers, count
        base = copy.deepcopy(models[0]).to("meta")
        self.single = lambda p, b, x: functional_call(base, (p, b), (x,)).squeeze(-1)

    def parameters_by_name(self):
        return {name: self.stacked[name.replace(".", "_")] for name in self.names}

    def forward(self, x, each=False):
        return vmap(self.single, in_dims=(0, 0, 0 if each else None))(self.parameters_by_name(), self.buffers_, x)


ensemble = Ensemble(3)
optimizer = torch.optim.Adam(ensemble.parameters(), lr=1e-2)
for epoch in range(2):
    for a, b in train:
        boot = torch.poisson(torch.ones(3, len(b)))
        out = ensemble(a)
        losses = (boot * (out - b) ** 2).sum(1) / boot.sum(1).clamp(min=1)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    print(f"ensemble {epoch}", " ".join(f"{v:.10g}" for v in losses.tolist()))
with torch.no_grad():
    parts = [(ensemble(a), b) for a, b in test]
    mean, spread = zip(*((o.mean(0), o.var(0)) for o, _ in parts))
    error = torch.cat([(m - b).square() for m, (_, b) in zip(mean, parts)])
    print(f"mean error {error.mean():.10g} spread {torch.cat(spread).mean():.10g}")
    stacked = torch.stack([x[:8], x[8:16], x[16:24]])
    print(f"each {ensemble(stacked, each=True).sum().item():.10g}")

model = make()
params = {k: v.detach() for k, v in model.named_parameters()}


def loss_of(params, sample, target):
    return (functional_call(model, params, (sample.unsqueeze(0),)).squeeze() - target) ** 2


per_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
for epoch in range(2):
    clipped = 0
    for a, b in train:
        grads, values = per_sample(params, a, b)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        clipped += int((factor < 1).sum())
        for name, g in grads.items():
            summed = torch.einsum("n,n...->...", factor, g)
            noise = 0.2 * torch.randn_like(params[name])
            params[name] = params[name] - 0.1 * (summed + noise) / len(a)
    print(f"private {epoch} {values.mean().item():.10g} norm {norms.max().item():.10g} clipped {clipped}")

for a, b in test:
    jacobian = vmap(jacrev(lambda p, s: functional_call(model, p, (s,))), (None, 0))(params, a)
    flat = torch.cat([j.flatten(1) for j in jacobian.values()], 1)
    kernel = flat @ flat.T
    curvature = vmap(hessian(lambda s: functional_call(model, params, (s,)).squeeze()))(a)
    _, tangent = jvp(lambda s: functional_call(model, params, (s,)), (a,), (torch.ones_like(a),))
    out, pull = vjp(lambda p: functional_call(model, p, (a,)), params)
    (cotangent,) = pull(torch.ones_like(out) / len(a))
    laplacian = curvature.diagonal(dim1=-2, dim2=-1).sum(-1)
    print(
        f"kernel {kernel.trace().item():.10g} laplacian {laplacian.mean().item():.10g} tangent {tangent.sum().item():.10g}"
        f" cotangent {cotangent['0.weight'].norm().item():.10g} spectrum {torch.linalg.eigvalsh(kernel)[-1].item():.10g}"
    )
fisher = {k: torch.zeros_like(v) for k, v in params.items()}
for a, b in train:
    for k, g in vmap(grad(loss_of), in_dims=(None, 0, 0))(params, a, b).items():
        fisher[k] += g.square().sum(0)
draws = [{k: v + torch.randn_like(v) / (fisher[k] + 1).sqrt() for k, v in params.items()} for _ in range(4)]
for a, b in test:
    outs = torch.stack([functional_call(model, d, (a,)).squeeze(1) for d in draws])
    print(f"laplace {(outs.logsumexp(0) - math.log(4)).mean().item():.10g} {outs.std(0).mean().item():.10g}")

center = nn.utils.parameters_to_vector(model.parameters()).detach()
fitness = DataLoader(TensorDataset(x[:35], y[:35]), batch_size=35)


def unflatten(vector):
    out, begin = {}, 0
    for name, p in model.named_parameters():
        out[name] = vector[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return out


for generation in range(4):
    half = torch.randn(6, len(center))
    noise = torch.cat([half, -half])
    for a, b in fitness:
        candidates = center + 0.1 * noise
        scores = -vmap(lambda v: (functional_call(model, unflatten(v), (a,)).squeeze(1) - b).square().mean())(candidates)
    ranks = scores.argsort().argsort().double() / (len(scores) - 1) - 0.5
    center = center + 0.05 / (len(noise) * 0.1) * (ranks @ noise)
    print(f"evolution {generation} {scores.max().item():.10g} {scores.mean().item():.10g} {center.norm().item():.10g}")
