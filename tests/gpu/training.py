"""A training loop on GPU ranks beside one device on the global batch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.cli.demo.model import GPT, GPTConfig
from fxdp.ir.tensor_difference import difference
from tests.exactness.test_sharded import Words
from tests.fallbacks import no_fallback


class Convolutions(nn.Module):
    """BatchNorm over the batch, in two layers that are alike, and a mean that is the loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(2)
        ]
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), target)


class Towers(nn.Module):
    """Contrastive: each sample is the negative of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = self.scale.exp() * left @ right.T
        labels = torch.arange(len(a), device=a.device)
        return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


class Dropping(nn.Module):
    """Dropout on all samples, of which each rank draws its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 5), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), target)


def _words(size: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 7, (size,)), torch.randint(0, 7, (size,))


def _classified(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randn(size, *shape), torch.randint(0, 5, (size,)))


def _gpt() -> nn.Module:
    return GPT(GPTConfig(64, 16, layers=3, width=32, heads=2))


def _tokens(size: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(64, (size, 17))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "words": (Words, _words),
    "convolutions": (Convolutions, _classified(3, 8, 8)),
    "towers": (Towers, lambda size: (torch.randn(size, 6), torch.randn(size, 5))),
    "dropping": (Dropping, _classified(6)),
    "gpt": (_gpt, _tokens),
}


def train(name: str, axes: tuple[str, ...], split: list[int], options: dict[str, Any]) -> tuple[float, float]:
    """Worst errors of losses, and of parameters, buffers and gradients, over five steps of AdamW.

    The second step accumulates two gradients; from the third on the ranks' sizes are turned round.
    """
    torch.set_default_dtype(torch.float64)
    build, batch_of = CASES[name]
    rank, world, device = (
        dist.get_rank(),
        dist.get_world_size(),
        torch.device("cuda", torch.cuda.current_device()),
    )
    torch.manual_seed(rank)
    model = build().to(device)
    torch.manual_seed(0)
    twin = build().to(device)
    sizes = (world,) if len(axes) == 1 else (2, world // 2)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=axes)
    place = rank % len(split)
    with no_fallback():
        compiled = fxdp.compile(model, mesh, **options)
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (compiled, twin)]
        worst = worst_gradient = 0.0
        for step in range(5):
            torch.manual_seed(step)
            full = tuple(t.to(device) for t in batch_of(sum(split)))
            own = tuple(t.split(split)[place] for t in full)
            for _ in range(2 if step == 1 else 1):
                torch.manual_seed(100 + step)
                loss = compiled(*own)
                loss.backward()
                torch.manual_seed(100 + step)
                expected = twin(*full)
                expected.backward()
                worst = max(worst, float((loss - expected).detach().abs()))
            worst_gradient = max(worst_gradient, _gradient_error(compiled, twin))
            for net, optimizer in zip((compiled, twin), optimizers, strict=True):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            split = split[::-1] if step >= 1 else split
    pairs = zip(compiled.state_dict().items(), twin.state_dict().items(), strict=True)
    errors = [difference(_full(a).double(), b.double()) for (_, a), (_, b) in pairs]
    return worst, max(worst_gradient, *errors)


def _gradient_error(compiled: nn.Module, twin: nn.Module) -> float:
    worst = 0.0
    for ours, theirs in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            worst = max(worst, float((_full(ours.grad) - theirs.grad).abs().max()))
    return worst


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
