"""Batch sizes that collide with every other size: a wrong guess costs a gather, never a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fxdp
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "view": lambda x, w, y: x.view(x.size(0), -1),
    "view of a constant": lambda x, w, y: x.view(4, -1),
    "view to one dim": lambda x, w, y: x.view(-1) * 2,
    "merge the last dims": lambda x, w, y: x.reshape(-1, 16),
    "transpose and view": lambda x, w, y: x.transpose(0, 1).reshape(4, 16),
    "expand": lambda x, w, y: x[:, :1].expand(4, 4, 4) + x,
    "full operand of its size": lambda x, w, y: x * w,
    "full operand, one dim more": lambda x, w, y: x + w.view(4, 4, 1),
    "matrix products": lambda x, w, y: x @ w + w @ x,
    "batched": lambda x, w, y: torch.bmm(x, x.transpose(1, 2)),
    "outer": lambda x, w, y: torch.einsum("bij,bik->bjk", x, x),
    "over samples": lambda x, w, y: torch.einsum("bij,cij->bc", x, x),
    "sums": lambda x, w, y: (x.sum(0), x.sum(1), x.sum((0, 2)), x.mean((1, 2)), x.amax(0), x.argmax(0)),
    "softmaxes": lambda x, w, y: (x.softmax(0), x.softmax(1), x.log_softmax(2)),
    "cumulative": lambda x, w, y: (x.cumsum(0), x.cumprod(1)),
    "sorts": lambda x, w, y: (x.sort(0)[0], x.topk(2, 1)[0]),
    "flips": lambda x, w, y: (x.flip(0), x.flip(1), x.roll(1, 0), x.roll(1, 2)),
    "joins": lambda x, w, y: (torch.cat([x, x]), torch.cat([x, w[None]]), torch.stack([x, x], 2)),
    "stacks": lambda x, w, y: (torch.stack([x, x]), torch.cat([x, x], 1), torch.hstack([x, x])),
    "splits": lambda x, w, y: (*x.split(1), *x.chunk(2, 1), *x.unbind(2)),
    "slices": lambda x, w, y: (x[1:3], x[:, 1:3], x[::2], x[..., -1], x[-1]),
    "picked": lambda x, w, y: (x[y], x[:, y], w[y], x[torch.arange(4), y], x[torch.arange(4), :, y]),
    "gathered": lambda x, w, y: x.gather(0, y.view(1, 4, 1).expand(4, 4, 4)),
    "taken": lambda x, w, y: x.take_along_dim(y.view(4, 1, 1), 1),
    "one-hot": lambda x, w, y: (F.one_hot(y, 4), F.embedding(y, w)),
    "masks": lambda x, w, y: (x.masked_fill(w > 0, 0.0), torch.where(w > 0, x, x.flip(0))),
    "triangles": lambda x, w, y: (x.tril(), x[0].triu()),
    "normalized": lambda x, w, y: (F.layer_norm(x, (4, 4)), F.layer_norm(x, (4,)), F.normalize(x, dim=0)),
    "batch norm": lambda x, w, y: F.batch_norm(x, None, None, training=True),
    "distances": lambda x, w, y: (torch.cdist(x, x), torch.cdist(x[:, 0], w)),
    "diagonals": lambda x, w, y: (x.diagonal(0, 0, 1), torch.diag_embed(x[:, 0]), torch.eye(4) * x),
    "repeats": lambda x, w, y: (x.repeat(2, 1, 1), x.repeat_interleave(2, 0), x.tile(1, 4, 1)),
    "counted in memory": lambda x, w, y: (
        x.transpose(0, 1).as_strided((4, 4, 4), (16, 1, 4)), x.as_strided((3, 2), (16, 5), 1),
        (x @ w).transpose(1, 2).as_strided((7, 4), (8, 1)),
    ),
    "windows": lambda x, w, y: (x.unfold(1, 2, 1), x.unfold(0, 2, 1)),
    "attention": lambda x, w, y: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "linear solvers": lambda x, w, y: torch.linalg.solve(x + 9 * torch.eye(4), w),
}  # fmt: skip
"""Of `x`: [4, 4, 4], a batch of 4, a full `w`: [4, 4], and labels `y`: [4]; each size may count samples."""


def _results(batch: Any, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    x, w, y = torch.randn(4, 4, 4), torch.randn(4, 4), torch.tensor([3, 0, 0, 2])
    x, y = batch(x.requires_grad_(), y)
    found = OPS[name](x, w, y)
    results = dict(enumerate(found if isinstance(found, tuple) else (found,)))
    differentiable = [r for r in results.values() if r.requires_grad]
    grads = torch.autograd.grad(sum((r * r).sum() for r in differentiable), x) if differentiable else ()
    return {f"{name} {i}": r for i, r in results.items()} | {f"{name} gradient": g for g in grads}


def _errors(split: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    return {
        name: difference(plain(_results(on_one_device, name)), plain(_results(OnRanks(split), name)))
        for name in OPS
    }


def test_sizes_that_collide_cost_no_number(ranks: RankPool) -> None:
    for found in ranks.run(3, _errors, (3, 0, 1)):
        assert {name: where for name, (error, where) in found.items() if error > EXACT} == {}
        assert found.keys() == OPS.keys()


def test_a_size_that_counts_samples_is_found() -> None:
    x = fxdp.global_batch(torch.ones(8, 2, 3))
    for y in (
        x.view(8, -1),
        x.view(-1, 3),
        x.reshape(8, 6),
        x * torch.ones(8, 1, 1),
        x.view(4, -1).view(8, 6),
    ):
        assert y.shape.numel() == 48
    assert x.view(8, -1).placements == (fxdp.S(0),)
    assert x.view(-1, 3).placements == (fxdp.S(0),)
    assert (x * torch.ones(8, 1, 1)).placements == (fxdp.S(0),)
    assert x.sum((1, 2)).placements == (fxdp.S(0),)
