"""Ops along the batch dim need all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxdp.torch_compat import torch_release
from tests.exactness.cases import D, exact_body, in_fours, rows, traffic

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

UNKNOWN = {"cumprod", "quantile"} if torch_release() == "2.11" else set()
"""What torch itself has for no batch that is a symbol: `torch.export` and `torch.compile` refuse it."""

SLICE = D * 8
"""Bytes of one number per column, which is what a reduction over the batch must send."""

REDUCED = {
    "softmax": 2 * SLICE, "log_softmax": 2 * SLICE, "logsumexp": 2 * SLICE, "amax": SLICE, "max": 8,
    "max_with_place": 2 * SLICE, "argmin": 2 * SLICE, "any": D, "all": 1, "norms": 3 * SLICE + 8,
}  # fmt: skip
"""The closed form of each forward: all-reduces of this many bytes together, and nothing gathered."""

IN_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(0).sum(1),
    "log_softmax": lambda x: x.log_softmax(0).sum(1),
    "logsumexp": lambda x: x.logsumexp(0),
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(),
    "max_with_place": lambda x: tuple(x.max(0)),
    "argmin": lambda x: x.argmin(0),
    "any": lambda x: (x > 2).any(0),
    "all": lambda x: (x > -9).all(),
    "norms": lambda x: (x.norm(float("inf"), 0), x.norm(1, 0), x.norm(3, dim=0), x.norm(float("-inf"))),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_one_number_per_slice_is_reduced(name: str) -> None:
    local = exact_body(lambda fc, x: IN_PARTS[name](fc(x)), rows(), splits=SPLITS)
    sent = [row for row in traffic(local) if row.phase == "forward" and row.op != "reduce_scatter"]
    assert {row.op for row in sent} == {"all_reduce"}
    assert sum(row.bytes for row in sent) == REDUCED[name]
    backward = [row for row in traffic(local) if row.phase == "backward"]
    assert {row.op for row in backward} <= {"all_reduce"}
    assert sum(row.bytes for row in backward) <= REDUCED[name]


def test_ties_and_nan_over_the_batch() -> None:
    """Equal rows on different ranks: the first counts, and gradients are shared as eager shares them."""

    def body(fc: torch.nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.cat([fc(x), fc(x)], 1).round(decimals=0) * fc.weight[0, 0]
        values, places = z.max(0)
        return values, places, z.amax(0), z.amin((0, 1)), z.argmin(0), (x / x.relu()).amax(0)

    exact_body(body, rows(), splits=SPLITS)


@pytest.mark.parametrize("names", in_fours(OPS, alone=("cumprod",)), ids=" ".join)
def test_along_the_batch(names: tuple[str, ...]) -> None:
    known = [name for name in names if name not in UNKNOWN]
    if not known:
        pytest.skip("this torch has it for no batch that is a symbol")
    exact_body(lambda fc, x: tuple(OPS[name](fc(x)) for name in known), rows(), splits=SPLITS)
