"""`rng="single-device"` on two GPU ranks: the numbers that eager draws on one GPU for the global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.ir.tensor_difference import difference
from tests.exactness.cases import Model
from tests.fallbacks import no_fallback
from tests.gpu.ranks import ON_GPUS, run_ranks

pytestmark = ON_GPUS

WIDTH = 32


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, 16)).transpose(1, 2)


def _attended(h: Tensor, bias: Tensor | None = None, causal: bool = False) -> Tensor:
    q = _heads(h)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias, dropout_p=0.3, is_causal=causal)


def _below(h: Tensor) -> Tensor:
    """A bias of each sample's own, whose rows are of 6 elements."""
    return _heads(h) @ _heads(h).mT


# the layer's output is [samples, 6 positions, WIDTH]
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "of a slice": lambda h: F.dropout(h[:, 0], 0.3),
    "of other slices": lambda h: F.dropout(h[..., 1:4], 0.3) + F.dropout(h[:, 1:3].sum(1), 0.3)[:, None, :3],
    "of what is permuted": lambda h: F.dropout(h.transpose(1, 2), 0.3),
    "of what is expanded": lambda h: F.dropout(h[:, :1].expand(-1, 4, -1), 0.3),
    "of an odd number": lambda h: F.dropout(h[..., :5].contiguous()[:, :3].contiguous(), 0.3),
    "of channels": lambda h: F.dropout1d(h, 0.3),
    "alpha": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "noise": lambda h: h + 0.1 * torch.randn_like(h) + 0.1 * torch.rand(len(h), 1, WIDTH, device=h.device),
    "in place": lambda h: h * torch.empty_like(h).uniform_() + torch.empty_like(h[:, 0]).normal_()[:, None],
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h)) + h * torch.ones_like(h).bernoulli_(0.3),
    "numbers": lambda h: h * torch.randint_like(h.detach(), 5) + h * torch.rand_like(h[:, :1]).exponential_(),
    "gumbel": lambda h: F.gumbel_softmax(h, dim=-1),
    "rrelu": lambda h: F.rrelu(h, training=True),
}
ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": _attended,
    "causal attention": lambda h: _attended(h, causal=True),
    "attention with a bias": lambda h: _attended(h, _below(h)),
    "attention with a mask": lambda h: _attended(h, (h[:, None, None, :, 0] > -2).expand(-1, 1, 6, 6)),
}


def _loss_of(draw: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda layer, x: draw(layer(x)).double().square().mean()


def _errors(kind: str, backend: Any) -> dict[str, float | str]:
    """By name: the worst error of loss and gradients in two steps of other uneven sizes, or what was said."""
    dtype = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
    bodies = DRAWS if dtype == torch.float64 else ATTENTION
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    found: dict[str, float | str] = {}
    for name, draw in bodies.items():
        torch.manual_seed(0)
        model = Model(_loss_of(draw), nn.Linear(8, WIDTH)).cuda().to(dtype)
        twin = copy.deepcopy(model)
        compiled = fxdp.compile(model, mesh, rng="single-device", backend=backend)
        errors = []
        for split in ([3, 2], [2, 4]):
            torch.manual_seed(1)
            full = torch.randn(sum(split), 6, 8, device="cuda", dtype=dtype)
            losses = []
            for module, x in ((compiled, full.split(split)[dist.get_rank()].clone()), (twin, full)):
                module.zero_grad()
                torch.manual_seed(2)
                with no_fallback():
                    loss = module(x)
                    loss.backward()
                losses.append(loss.detach())
            errors.append(difference(*losses))
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            errors += [difference(p.grad.float(), q.grad.float(), 1e-3) for p, q in pairs]  # type: ignore[union-attr]
        found[name] = max(errors)
    return found


@pytest.mark.parametrize(
    ("kind", "backend", "most"),
    [
        ("float64", "eager", 1e-9),
        ("float64", "inductor", 1e-9),
        ("float32", "eager", 1e-4),
        ("float32", "inductor", 1e-4),
        ("bfloat16", "eager", 3e-2),
        ("bfloat16", "inductor", 3e-2),
    ],
)
def test_ranks_draw_as_one_gpu(kind: str, backend: str, most: float, tmp_path: Path) -> None:
    """Dropout in float64; fused attention, which has kernels of its own for the narrower types."""
    for found in run_ranks(2, tmp_path, _errors, kind, backend):
        assert {name: error for name, error in found.items() if not error <= most} == {}
