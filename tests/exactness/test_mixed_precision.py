"""Mixed precision: the dtypes are those of the policy, the numbers those of one device that casts alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fxdp
from fxdp.errors import InputError, MeshError
from fxdp.ir.tensor_difference import difference
from tests.captures import KNOWN, captured_once
from tests.exactness.models import part
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool

F16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class Scored(nn.Module):
    """A weight used twice, a norm, a frozen layer, a parameter without dims; a loss with masked targets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.frozen = nn.Linear(9, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(F32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert self.inner.weight.dtype == x.dtype  # both are cast, or none
        h = self.frozen(torch.relu(self.norm(self.inner(x)))) * self.scale
        return F.cross_entropy(F.linear(h, self.inner.weight), target, ignore_index=0)


def _batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, generator=generator, dtype=F32)
    return x, torch.randint(0, 9, (size,), generator=generator)


def _cast_alike(model: nn.Module, dtype: torch.dtype, x: Tensor, target: Tensor) -> Tensor:
    """What one device computes by the policy, written out."""
    own = {name: p.to(dtype) for name, p in model.named_parameters()}
    loss: Tensor = torch.func.functional_call(model, own, (x.to(dtype), target))
    return loss.float()


def _train(split: list[int], **options: Any) -> tuple[float, float, set[str]]:
    torch.manual_seed(0)
    model, twin = Scored(), Scored()
    twin.load_state_dict(model.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=F64, output_dtype=F32)
    with no_fallback(), captured_once(KNOWN.setdefault(__name__, {})):
        compiled = fxdp.compile(model, mp_policy=policy, **options)
        optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (compiled, twin)]
        worst, rank = 0.0, torch.distributed.get_rank()
        for step in range(3):
            full = _batch(step, sum(split))
            loss = compiled(*(part(t, split, rank) for t in full))
            expected = _cast_alike(twin, F64, *full)
            for one in (loss, expected):
                one.backward()
            worst = max(worst, float((loss - expected).detach().abs()))
            dtypes = {str(p.grad.dtype) for p in compiled.parameters() if p.grad is not None}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    pairs = [(getattr(a, "full_tensor", lambda a=a: a)().detach(), b.detach())
             for a, b in zip(compiled.parameters(), twin.parameters(), strict=True)]  # fmt: skip
    return worst, max(difference(a, b) for a, b in pairs), dtypes


@pytest.mark.parametrize(
    ("split", "options"),
    [
        ([3, 3], {"strategy": "shard"}),  # compiled once for both ranks
        ([4, 1], {"strategy": "replicate", "backend": "eager"}),
        ([4, 1], {"strategy": "optimizer", "backend": "eager"}),
        (
            [4, 1],
            {"strategy": "auto", "memory_limit": 4300, "backend": "eager"},
        ),  # too little for entire ones
    ],
)
def test_training_equals_one_device_that_casts(
    ranks: RankPool, split: list[int], options: dict[str, Any]
) -> None:
    """In float64, so that all that differs is the rounding of gradients to the parameters' float32."""
    for worst_loss, worst_parameter, dtypes in ranks.run(2, _train, split, **options):
        assert worst_loss <= 1e-6
        assert worst_parameter <= 1e-6
        assert dtypes == {"torch.float32"}


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp_replicate": 2, "dp_shard": 2}])
@pytest.mark.parametrize(
    ("policy", "gathered", "summed"),
    [
        (MixedPrecisionPolicy(param_dtype=F16, reduce_dtype=F32), F16, F32),
        (MixedPrecisionPolicy(param_dtype=F16), F16, F16),
        (MixedPrecisionPolicy(reduce_dtype=F16), F32, F16),
        (MixedPrecisionPolicy(param_dtype=F64, output_dtype=F32), F32, F64),  # wider: cast after the gather
    ],
)
def test_what_travels_has_the_dtypes_of_the_policy(
    mesh: dict[str, int], policy: MixedPrecisionPolicy, gathered: torch.dtype, summed: torch.dtype
) -> None:
    given = {"mesh": mesh, "mp_policy": policy, "strategy": "shard"}
    with captured_once(KNOWN.setdefault(__name__, {})):
        report = fxdp.verify(Scored(), _batch(0, 9), precision="own", **given)
        rows = fxdp.plan(Scored(), _batch(0, 9), **given).communication
    assert report.ok, str(report)
    shards = mesh.get("dp_shard", 3)
    sizes = {name: p for name, p in Scored().named_parameters() if p.dim()}
    padded = {name: -(-p.shape[0] // shards) * shards * p[0].numel() for name, p in sizes.items()}
    forward = sum(row.bytes for row in rows if row.op == "all_gather_shards" and row.phase == "forward")
    assert forward == sum(padded.values()) * gathered.itemsize
    trained = sum(n for name, n in padded.items() if "frozen" not in name)
    assert sum(row.bytes for row in rows if row.op == "reduce_scatter_shards") == trained * summed.itemsize


def test_replicated_gradients_travel_in_the_reduce_dtype() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=F16)
    rows = fxdp.plan(Scored(), _batch(0, 9), mesh={"dp": 2}, mp_policy=policy).communication
    trained = sum(p.numel() for p in Scored().parameters() if p.requires_grad)
    assert [row.bytes for row in rows if row.phase == "backward"] == [2 * trained]


def test_policies_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InputError, match=r"mp_policy is a str, expected a .*MixedPrecisionPolicy"):
        fxdp.compile(Scored(), mp_policy="bf16")  # type: ignore[arg-type]
    policy = MixedPrecisionPolicy(param_dtype=torch.int8)
    with pytest.raises(InputError, match=r"param_dtype=torch\.int8, expected a floating-point dtype"):
        fxdp.compile(Scored(), mp_policy=policy)
    narrow = MixedPrecisionPolicy(param_dtype=F16)
    with pytest.raises(MeshError, match=r"expected .*\(\.\.\., reduce_dtype=torch\.float32\)"):
        fxdp.plan(Scored(), _batch(0, 8), mesh={"dp": 2}, mp_policy=narrow, pipeline={"microbatches": 2})
    wide = MixedPrecisionPolicy(param_dtype=F16, reduce_dtype=F32)
    assert fxdp.plan(
        Scored(), _batch(0, 8), mesh={"dp": 2}, mp_policy=wide, pipeline={"microbatches": 2}
    ).communication


class ValueSnapshot(nn.Module):
    """What autocast leaves in float32: scores, a region of the model's own, and the backwards of both."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 24)
        self.iteration = nn.Parameter(torch.randn(4, 4))
        self.to(F32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.fc(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        with torch.autocast("cpu", enabled=False):
            query, key = (part.float() @ self.iteration for part in (query, key))
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        return out.float().square().mean()


def test_under_autocast_nothing_is_cast_but_what_eager_casts() -> None:
    torch.manual_seed(0)
    model, x = ValueSnapshot(), torch.randn(5, 6, 8, dtype=F32)
    found = []
    for run in (fxdp.compile(model, backend="eager"), model):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(x)
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    for own, eager in zip(*found, strict=True):
        assert difference(own, eager) <= 1e-6
