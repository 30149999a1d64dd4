"""Gradients that are summed where they lie are their owner's: what he does with them reaches nobody, ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.exactness.models import counterpart_of, gradient_errors, part
from tests.rank_pool import RankPool

_SPLITS = [5, 0, 2], [1, 3, 3], [0, 1, 6], [2, 2, 3]
_EXACT = 1e-12


class Wide(nn.Module):
    """Weights of 400 KB, too large for messages, in several buckets that cut them."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Linear(40, 220), nn.Tanh(), nn.Linear(220, 220), nn.Tanh(), nn.Linear(220, 5)]
        self.body = nn.Sequential(*layers).double()
        self.body[2].weight.requires_grad_(not frozen)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


class _Pair:
    """The compiled model on this rank's samples, and its twin on all."""

    def __init__(self, **options: Any) -> None:
        model = Wide(frozen=options.pop("frozen", False))
        self.twin, self.rank, self.number = counterpart_of(model), dist.get_rank(), 0
        self.compiled = fxdp.compile(model, communication={"bucket_cap_mb": 0.25}, **options)
        self.held = list(self.compiled.parameters())

    def backward(self) -> None:
        torch.manual_seed(self.number)
        x, y = torch.randn(7, 40, dtype=torch.float64), torch.randint(5, (7,))
        split = _SPLITS[self.number % len(_SPLITS)]
        self.number += 1
        self.compiled(part(x, split, self.rank), part(y, split, self.rank)).backward()
        self.twin(x, y).backward()

    def error(self) -> float:
        return max(gradient_errors(self.compiled, self.twin))

    def drop(self, to_none: bool = True) -> None:
        self.compiled.zero_grad(set_to_none=to_none)
        self.twin.zero_grad(set_to_none=to_none)


def _kept_and_written(options: dict[str, Any]) -> list[bool]:
    return _keep_and_write(_Pair(**options))


def _keep_and_write(pair: _Pair) -> list[bool]:
    right = []
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(8):
        pair.backward()
        if pair.rank == step % 3:  # at once, while others may still be at their sums
            seen = [None if p.grad is None else p.grad.clone() for p in pair.held]
            for p in pair.held:
                if p.grad is not None:
                    p.grad.fill_(float("nan"))
            for p, value in zip(pair.held, seen, strict=True):
                if p.grad is not None and value is not None:
                    p.grad.copy_(value)
        else:
            time.sleep(0.01 * (step % 2))
        right.append(pair.error() < _EXACT)
        kept += [(p.grad, p.grad.clone()) for p in pair.held if p.grad is not None]
        pair.drop()
    return [*right, all(torch.equal(now, then) for now, then in kept)]


def _accumulated(options: dict[str, Any]) -> list[bool]:
    return _accumulate(_Pair(**options))


def _accumulate(pair: _Pair) -> list[bool]:
    right = []
    for step in range(6):
        with pair.compiled.no_sync():
            pair.backward()
        pair.backward()
        right.append(pair.error() < _EXACT)
        pair.drop(to_none=step % 2 == 0)
    return right


def _hooked(options: dict[str, Any]) -> list[bool]:
    pair, right = _Pair(**options), []
    took: dict[nn.Module, list[Tensor]] = {pair.compiled: [], pair.twin: []}

    def take(model: nn.Module, p: Tensor) -> None:
        took[model].append(p.grad)
        p.grad = None

    for model, handed in took.items():
        first, *others = [p for p in model.parameters() if p.requires_grad]
        first.register_hook(lambda gradient: gradient * 3)
        for p in others:
            p.register_post_accumulate_grad_hook(lambda p, model=model: take(model, p))
        assert not handed
    for _ in range(3):
        pair.backward()
        right.append(pair.error() < _EXACT)
    a, b = took.values()
    # each gradient, also of steps before, whichever parameter's came first
    sums = [sorted(float(g.abs().sum()) for g in handed) for handed in (a, b)]
    return [*right, len(a) == len(b) > 9, sums[0] == pytest.approx(sums[1], rel=1e-10)]


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"pipeline": {"microbatches": 2}}])
def test_kept_written_accumulated_and_taken_by_hooks(ranks: RankPool, options: dict[str, Any]) -> None:
    options = {"backend": "eager", **options}
    assert ranks.run(3, _kept_and_written, options) == [[True] * 9] * 3
    assert ranks.run(3, _accumulated, options) == [[True] * 6] * 3
    assert ranks.run(3, _hooked, options) == [[True] * 5] * 3


def _both() -> list[bool]:
    pair = _Pair()  # compiled once
    return [*_keep_and_write(pair), *_accumulate(pair)]


def test_by_inductor(ranks: RankPool) -> None:
    assert ranks.run(3, _both) == [[True] * (9 + 6)] * 3
