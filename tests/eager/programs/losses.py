"""Losses, metrics and noise outside of any module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.eager.programs.listed import Batch, data, gradients, net, program


@program
def autocorrelation(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(outputs=6), data()
    conjugated = batch(torch.complex(x, x.flip(1)).conj(), x)[0]
    x = batch(x)
    keys = torch.fft.rfft(model(x), dim=1)
    found = torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.conj(keys), n=6, dim=1)
    loss = (found.topk(2, dim=1).values * torch.conj(keys).imag[:, :2]).sum()
    loss.backward()
    return {"loss": loss.item(), "imag": (conjugated * 2).imag.sum().item(), **gradients(model)}


@program
def cross_entropy_with_ignored_labels(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), data()
    y[2] = y[6] = -100
    x, y = batch(x, y)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def cross_entropy_with_weights_and_smoothing(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    loss = F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 0.5, 1.5]), label_smoothing=0.1)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def sum_and_mean_of_squares(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), data()
    x, t = batch(x, torch.randn(8, 4))
    loss = F.mse_loss(model(x), t, reduction="sum") + F.mse_loss(model(x), t) + F.l1_loss(model(x), t)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def binary_cross_entropy(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(outputs=1), data()
    x, y = batch(x, (y > 1).double())
    p = model(x).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(p, y) + F.binary_cross_entropy(torch.sigmoid(p), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def accuracy_and_top_k(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    correct = 0
    with torch.no_grad():
        out = model(x)
        loss = F.nll_loss(F.log_softmax(out, 1), y, reduction="sum").item()
        pred = out.argmax(dim=1, keepdim=True)
        correct += pred.eq(y.view_as(pred)).sum().item()
        accuracy = (out.argmax(1) == y).float().mean()
        top = out.topk(2, 1)[1].t()
        hits = top.eq(y.view(1, -1).expand_as(top)).reshape(-1).float().sum(0, keepdim=True)
    sizes = str((x.size(0), len(x), *out.shape))
    shown = f"{accuracy:.9f}"
    return {"loss": loss, "correct": correct, "accuracy": shown, "sizes": sizes, "top": hits.item()}


@program
def results_read_on_the_host(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    out = model(x).detach()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    return {
        "out": out, "sorted": out[:, 0].sort()[0], "largest": out.max().item(),
        "var": out.var(0).sum().item(), "std": out.std().item(), "list": torch.tensor(out[0].tolist()),
        "array": torch.from_numpy(out.mean(0).numpy()),
        "cumsum": out.cumsum(0).sum().item(), "unique": y.unique().numel(),
        "by row": sum(float(row.sum()) for row in out), "flipped": float((out.flip(0) * out).sum()),
        "permuted": float((out[order] * out).sum()), "median": out.median().item(),
        "by numbers": out[[*y[:3]], [*out[:3].argmax(1)]],
    }  # fmt: skip


@program
def variational_autoencoder(batch: Batch) -> dict[str, Any]:
    encoder, decoder = net(outputs=6), net(3, outputs=6)
    x = batch(torch.rand(8, 6))
    torch.manual_seed(3)
    mu, logvar = encoder(x).chunk(2, 1)
    std = torch.exp(0.5 * logvar)
    out = torch.sigmoid(decoder(mu + torch.randn_like(std) * std))
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss = F.binary_cross_entropy(out, x.view(-1, 6), reduction="sum") + divergence
    loss.backward()
    return {"loss": loss.item(), "each": loss.item() / len(x), **gradients(encoder, decoder)}


@program
def generative_adversarial_networks(batch: Batch) -> dict[str, Any]:
    critic, generator = net(outputs=1), net(5, outputs=6)
    real = batch(data()[0])
    torch.manual_seed(5)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (critic, generator)]
    criterion, losses = nn.BCEWithLogitsLoss(), []
    for _ in range(3):
        n = real.size(0)
        critic.zero_grad()
        label = torch.full((n,), 1.0)
        on_real = criterion(critic(real).view(-1), label)
        on_real.backward()
        fake = generator(torch.randn(n, 5))
        label.fill_(0.0)
        on_fake = criterion(critic(fake.detach()).view(-1), label)
        on_fake.backward()
        optimizers[0].step()
        generator.zero_grad()
        label.fill_(1.0)
        fooled = criterion(critic(fake).view(-1), label)
        fooled.backward()
        optimizers[1].step()
        losses += [on_real.item(), on_fake.item(), fooled.item()]
    parameters = [*critic.parameters(), *generator.parameters()]
    return {"losses": torch.tensor(losses), **{f"p{i}": p.detach() for i, p in enumerate(parameters)}}


@program
def mixup(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    torch.manual_seed(11)
    order = torch.randperm(x.size(0))
    out = model(0.3 * x + 0.7 * x[order])
    loss = 0.3 * F.cross_entropy(out, y) + 0.7 * F.cross_entropy(out, y[order])
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}
