"""Control flow, masks and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.eager.programs.listed import Batch, data, gradients, net, program


@program
def control_flow(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    count = 0
    while x.norm() > 1.0 and count < 9:
        x, count = x * 0.7, count + 1
        if x.mean() > 0:
            x = x + 0.01
    out = model(x)
    if (out > 0.3).any():
        out = out * 2
    loss = F.cross_entropy(out, y)
    assert torch.isfinite(loss)
    loss.backward()
    return {"count": count, "loss": loss.item(), **gradients(model)}


@program
def boolean_masks(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    out, keep = model(x), y != 1
    loss, kept = F.cross_entropy(out[keep], y[keep]), out[keep]
    large = kept[kept[:, 0] > 0]
    loss = loss + large.pow(2).mean() + out[y == 2].sum() + torch.masked_select(out, out > 0).mean()
    loss.backward()
    counts = {"kept": kept.shape[0], "large": large.shape[0], "where": (y == 2).nonzero()}
    return {"loss": loss.item(), **counts, **gradients(model)}


@program
def writes_in_place(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    x = x.clone()
    x[:, 0] = 0
    x.mul_(2).add_(1)
    x[x > 2] = 2.0
    out, total = model(x), torch.zeros(4)
    total += out.detach().sum(0)
    out = out.clone()
    out[:, 1] *= 3
    out[0] = 1.0
    out[2:5].mul_(2)
    loss = F.cross_entropy(out, y)
    loss.backward()
    return {"loss": loss.item(), "total": total, **gradients(model)}


@program
def views_see_writes(batch: Batch) -> dict[str, Any]:
    x = batch(data()[0]).clone()
    row, column, flat = x[3], x[:, 2], x.view(-1)
    x.mul_(3)
    column.add_(1)
    row.fill_(5)
    flat[1] = 7
    x[4] += row
    return {"x": x, "row": row, "column": column, "flat": flat, "again": x[3] + x[4]}


@program
def batches_trained_by_lists(batch: Batch) -> dict[str, Any]:
    """As an attack trains its noise; `foreach` writes all of a list at once."""
    model, (x, y) = net(), batch(*data())
    pictures, noise = x.clone().requires_grad_(), torch.zeros_like(x).requires_grad_()
    optimizer = torch.optim.AdamW([pictures, noise], 0.1, foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures + noise), y)
        loss.backward()
        optimizer.step()
    return {"loss": loss.item(), "pictures": pictures.detach(), "noise": noise.detach()}


@program
def assigned_data(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    moved = torch.zeros_like(x).requires_grad_()
    for _ in range(2):
        F.cross_entropy(model(x + moved), y).backward()
        assert moved.grad is not None
        moved.data = (moved + 0.1 * moved.grad.sign()).clamp(-0.15, 0.15)
        moved.grad.data = 0 * moved.grad
    first = x.clone()
    first.data = first[:3]
    first.mul_(2)
    first.data[0] = 1.0
    return {"moved": moved, "first": first, "size": len(first), "x": x, **gradients(model)}
