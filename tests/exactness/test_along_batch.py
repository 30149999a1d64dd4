"""Ops along the batch dim need the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.cases import D, exact_body, rows

SPLITS = ((4, 3), (5, 2, 0, 1), (3, 3, 2, 2))

OPS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: tuple(x.cummax(0)),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "sort": lambda x: tuple(x.sort(0)),
    "argsort": lambda x: x.argsort(0),
    "topk": lambda x: tuple(x.topk(1, 0)),
    "kthvalue": lambda x: tuple(x.kthvalue(1, 0)),
    "argmax": lambda x: (x.argmax(0), x.argmin(0), x.argmax(), x.argmax(1)),
    "max": lambda x: (x.max(), x.amax(0), *x.max(0), *x.min(0)),
    "median": lambda x: (x.median(), *x.median(0)),
    "quantile": lambda x: x.quantile(0.3, 0),
    "flip": lambda x: (x.flip(0), x.flip(0, 1), x.flip(1)),
    "roll": lambda x: (x.roll(1, 0), x.roll(3), x.roll((1, 2), (0, 1)), x.roll(1, 1)),
    "norm": lambda x: (x.norm(), x.norm(dim=0), x.norm(p=1), x.norm(p=float("inf"), dim=0)),
    "std": lambda x: (x.std(), x.std(0), x.var(0, unbiased=False), *torch.std_mean(x, 0)),
    "mean": lambda x: (x.mean(), x.mean(0), x.nanmean(0), x.mean((0, 1), keepdim=True)),
    "prod": lambda x: (x.prod(), x.prod(0)),
    "any": lambda x: ((x > 2).any(), (x > -2).all(0), (x > 0).sum(0), torch.count_nonzero(x > 0)),
    "diff": lambda x: (x.diff(dim=1), x.diff(dim=0).sum()),
    "first_and_last": lambda x: (x[0], x[-1], x[:1], x[1:].sum(), x[:-1].mean(0)),
    "select": lambda x: (x.select(0, 0), x.narrow(0, 0, 1), x.unbind(1)[2]),
    "index": lambda x: (x[torch.tensor([0, 0])], x.take(torch.tensor([3]))),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0)).sum(0),
    "matmul_over_batch": lambda x: (x.T @ x, torch.einsum("bi,bj->ij", x, x)),
    "gram": lambda x: (x @ x.T, (x @ x.T).softmax(1) @ x),
    "fft": lambda x: torch.fft.fft(x, dim=0).abs(),
    "histc": lambda x: torch.histc(x.detach(), 4, -3, 3),
    "bincount": lambda x: torch.bincount((x > 0).long().sum(1), minlength=11),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "cat_with_itself": lambda x: (torch.cat([x, x]).sum(0), torch.cat([x, x.flip(1)]), torch.stack([x, x])),
    "triangles": lambda x: ((x @ x.T).tril().sum(1), (x @ x.T).triu(1), torch.trace(x @ x.T)),
    "outer": lambda x: (torch.outer(x[:, 0], x[:, 1]), x[:, None] - x[None]),
    "lerp_to_mean": lambda x: torch.lerp(x, x.mean(0), 0.3),
    "running_attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "lstsq_free": lambda x: torch.linalg.solve(x.T @ x + torch.eye(D), x.T).T,
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_along_the_batch(name: str) -> None:
    exact_body(lambda fc, x: OPS[name](fc(x)), rows(), splits=SPLITS)
