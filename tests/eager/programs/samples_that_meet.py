"""Samples that meet, gradients of gradients, and functions of one's own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.eager.programs.listed import Batch, data, gradients, net, program


@program
def contrastive(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), data()
    x, near = batch(x, x + 0.1 * torch.randn(8, 6))
    a, b = F.normalize(model(x), dim=1), F.normalize(model(near), dim=1)
    logits, labels = a @ b.t() / 0.1, torch.arange(x.size(0))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def simclr(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), data()
    x, near = batch(x, x + 0.1 * torch.randn(8, 6))
    f = F.normalize(torch.cat([model(x), model(near)]), dim=1)
    n = f.shape[0]
    similar = (f @ f.T).masked_fill(torch.eye(n, dtype=torch.bool), -9e15)
    positive = torch.eye(n, dtype=torch.bool).roll(n // 2, 0)
    loss = (-similar[positive] / 0.1 + torch.logsumexp(similar / 0.1, -1)).mean()
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def batch_norm(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(norm=True), batch(*data())
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    model.eval()
    evaluated = F.cross_entropy(model(x), y)
    buffers = {f"buffer {name}": value for name, value in model.named_buffers()}
    return {"loss": loss.item(), "eval": evaluated.item(), **gradients(model), **buffers}


@program
def gradient_penalty(batch: Batch) -> dict[str, Any]:
    critic = net(outputs=1)
    real, fake = batch(data()[0], data(9)[0])
    torch.manual_seed(7)
    alpha = torch.rand(real.size(0), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = critic(between)
    grad = torch.autograd.grad(
        outputs=out, inputs=between, grad_outputs=torch.ones(out.size()), create_graph=True,
        retain_graph=True, only_inputs=True,
    )[0].view(real.size(0), -1)  # fmt: skip
    penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    return {"loss": loss.item(), "penalty": penalty.item(), **gradients(critic)}


@program
def maml(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    names, parameters = zip(*model.named_parameters(), strict=True)
    inner = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
    fast = {name: p - 0.1 * g for name, p, g in zip(names, parameters, inner, strict=True)}
    loss = F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


@program
def autograd_function_and_hooks(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), batch(*data())
    out = model(x)
    out.register_hook(lambda grad: grad * 2)
    model[0].weight.register_hook(lambda grad: grad + 1)
    loss = _Square.apply(out).mean()  # type: ignore[no-untyped-call]
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def sparse_matrices(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), batch(*data())
    n = len(x)
    graph = torch.eye(n).roll(1, 0).to_sparse()
    hidden = torch.sparse.mm(graph, model(x)).tanh()
    diagonal = torch.arange(n).expand(2, n)
    weights = torch.sparse_coo_tensor(diagonal, hidden[:, 0], (n, n), check_invariants=True)
    loss = torch.sparse.mm(weights, hidden).square().mean() + (graph @ hidden).sum()
    loss.backward()
    return {"loss": loss.item(), "entries": (x > 0).to_sparse().indices().sum(), **gradients(model)}


@program
def second_derivatives_of_a_function(batch: Batch) -> dict[str, Any]:
    x, weight = batch(data()[0]), torch.linspace(-1, 1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own decompositions are scripted
        return {"hessian": torch.func.hessian(lambda w: (x @ w).tanh().square().mean())(weight)}


@program
def out(batch: Batch) -> dict[str, Any]:
    """As `torch_geometric.utils.cumsum` writes behind a zero; the last memory is plain."""
    x = batch(data()[0])
    sums, plain = x.new_zeros(len(x) + 1, x.shape[1]), torch.zeros(x.shape)
    torch.cumsum(x, 0, out=sums[1:])
    returned = torch.mul(x, 2, out=plain)
    return {"sums": sums, "plain": plain, "returned": returned}


@program
def nested_tensors(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        nested = torch.nested.nested_tensor([x[i : i + 1 + i % 3] for i in range(len(x))])
        scores = torch.nested.to_padded_tensor(model[0](nested), 0.0).sum(1)
    loss = F.cross_entropy(scores, y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}
