"""Programs by memory on ranks: what fits runs and equals one device, and nothing else begins."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxdp
from fxdp.errors import InputError
from fxdp.ir.tensor_difference import difference
from tests.captures import KNOWN, captured_once
from tests.compiler.test_strategy_choice import Layers
from tests.exactness.models import part
from tests.rank_pool import RankPool


def _compiled(model: nn.Module, strategy: str, limit: int | None) -> fxdp.CompiledModule:
    loss_fn = nn.functional.cross_entropy
    return fxdp.compile(
        model,
        strategy=strategy,
        memory_limit=limit,
        loss_fn=loss_fn,
        backend="eager",
        communication={"bucket_cap_mb": 1 / 256},
    )


def _train(limit: int | None) -> str:
    """Two steps beside one device; an optimizer is made before the first. The strategy, in words."""
    torch.manual_seed(0)
    model, full = Layers(), (torch.randn(5, 32), torch.randint(8, (5,)))
    twin = copy.deepcopy(model)
    compiled = _compiled(model, "auto", limit)
    own = tuple(part(t, [3, 2], dist.get_rank()) for t in full)
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (compiled, twin)]
    for _ in range(2):
        with torch.no_grad():
            compiled(own[0], target=own[1])
        losses = compiled(own[0], target=own[1]), nn.functional.cross_entropy(twin(full[0]), full[1])
        assert difference(*(loss.detach() for loss in losses)) <= 1e-12
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return compiled.plan.choice[0].partition("a rank: ")[2]


def _refused(strategy: str, limit: int) -> str:
    compiled = _compiled(Layers(), strategy, limit)
    x, y = torch.randn(3, 32), torch.randint(8, (3,))
    with pytest.raises(InputError) as caught:
        compiled(x, target=y)
    return str(caught.value)


def _peaks() -> dict[str, int]:
    x, y = torch.randn(3, 32), torch.randint(8, (3,))
    loss_fn = nn.functional.cross_entropy
    given = {"mesh": {"dp": 2}, "loss_fn": loss_fn, "communication": {"bucket_cap_mb": 1 / 256}}
    strategies = {s: {"strategy": s} for s in ("replicate", "optimizer", "shard")}
    strategies |= {"kept": {"strategy": "shard", "reshard_after_forward": False}}
    plans = {n: fxdp.plan(Layers(), (x,), {"target": y}, **s, **given) for n, s in strategies.items()}
    return {name: plan.memory()[0].peak.bytes for name, plan in plans.items()}


def _runs() -> None:
    torch.set_default_dtype(torch.float64)
    with captured_once(KNOWN.setdefault(__name__, {})):
        peaks = _peaks()
        assert _train(None).startswith("replicate, ")
        static = 4 * sum(p.nbytes for p in Layers().parameters())
        tight = (peaks["kept"] + peaks["shard"]) // 2
        assert tight < static < peaks["replicate"]
        assert _train(peaks["replicate"] - 1).startswith("optimizer, ")  # sharded at the first call
        assert _train(tight).startswith("shard, the last ")  # and before it
        text = _refused("auto", peaks["shard"] // 2)
        for words in ("shard: at most", "parameter 0.weight: ", "expected some ", "ranks along which"):
            assert words in text, text
        text = _refused("replicate", peaks["replicate"] - 1)
        assert "expected strategy='optimizer' (" in text, text


def test_memory_decides(ranks: RankPool) -> None:
    ranks.run(2, _runs)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "16GB"])
def test_a_limit_is_a_number_of_bytes(limit: Any) -> None:
    with pytest.raises(InputError, match=r"memory_limit is .*, expected the bytes that a rank may hold"):
        fxdp.compile(Layers(), memory_limit=limit)
