"""`strategy="auto"`: the cheapest lifetimes that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxdp
from fxdp.compiler import device_memory as memory
from fxdp.compiler.strategy_choice import legal_strategies
from fxdp.errors import MeshError
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options
from tests.captures import KNOWN, captured_once


class Layers(nn.Sequential):
    """As much memory in parameters as in activations."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(32, 8))


_X, _Y = torch.randn(16, 32), torch.randint(8, (16,))


def _plan(**options: Any) -> fxdp.Plan:
    given = {
        "mesh": {"dp": 4},
        "loss_fn": nn.functional.cross_entropy,
        "communication": {"bucket_cap_mb": 1 / 256},
        **options,
    }
    with captured_once(KNOWN.setdefault(__name__, {})):
        return fxdp.plan(Layers(), (_X,), {"target": _Y}, **given)


def _peak(**options: Any) -> int:
    (rank,) = _plan(**options).memory()
    return rank.peak.bytes


def _chosen(limit: int, **options: Any) -> tuple[str, ...]:
    return _plan(strategy="auto", memory_limit=limit, **options).choice


def test_the_first_that_fits_is_taken_and_says_why() -> None:
    replicate, optimizer = _peak(), _peak(strategy="optimizer")
    kept = _peak(strategy="shard", reshard_after_forward=False)
    shard = _peak(strategy="shard")
    assert replicate > optimizer > kept > shard
    assert _peak(strategy="shard", reshard_after_forward=2) > shard
    assert _peak(strategy="shard", reshard_after_forward=1) == kept
    assert _peak(strategy="shard", reshard_after_forward=4) == shard
    assert "a rank: replicate, the cheapest that fits" in _chosen(replicate)[0]
    assert "a rank: optimizer, the cheapest that fits" in _chosen(replicate - 1)[0]
    assert "all 5 buckets unsharded until the backward, the cheapest" in _chosen(optimizer - 1)[0]
    assert "the last 2 of 5 buckets unsharded until the backward" in _chosen((kept + shard) // 2)[0]
    assert "the last 2 of 5 buckets" in _chosen(shard)[0], "they are gone before the peak"
    none = _chosen(shard - 1)
    assert "a rank: shard, none fits; it needs least" in none[0]
    assert [line.split(":")[0].strip() for line in none[1:]] == ["replicate", "optimizer", "shard"]


def test_what_is_kept_is_exact() -> None:
    limit = (_peak(strategy="shard", reshard_after_forward=False) + _peak(strategy="shard")) // 2
    options = {"strategy": "auto", "memory_limit": limit, "precision": "own", "tolerance": 1e-5}
    report = fxdp.verify(
        Layers(), (_X,), {"target": _Y}, mesh={"dp": 4}, communication={"bucket_cap_mb": 1 / 256},
        loss_fn=nn.functional.cross_entropy, **options,
    )  # fmt: skip
    assert report.ok, str(report)


def test_the_plan_prints_it() -> None:
    plan = _plan(strategy="auto", memory_limit=2**30)
    assert "strategy='auto' with memory_limit=1.0 GiB a rank: replicate" in str(plan)
    assert fxdp.Plan.from_json(plan.to_json()).choice == plan.choice
    assert _plan(strategy="shard", memory_limit=9).choice[0].endswith("'shard' does not fit")
    assert _plan(strategy="shard").choice == ()


def test_the_axes_say_among_which_is_chosen() -> None:
    auto = Options(strategy="auto")
    assert legal_strategies(mesh_of({"dp": 2}, "cpu"), auto) == ("replicate", "optimizer", "shard")
    assert legal_strategies(mesh_of({"dp_shard": 2}, "cpu"), auto) == ("optimizer", "shard")
    assert legal_strategies(mesh_of({"dp_replicate": 2}, "cpu"), auto) == ("replicate",)
    with pytest.raises(MeshError, match="are sharded along 'dp_shard'"):
        legal_strategies(mesh_of({"dp": 2, "dp_shard": 2}, "cpu"), auto)


def test_a_container_has_less_than_its_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    said = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP", said)
    host = memory.device_memory("cpu")
    for text, expected in (("1000\n", 900), ("max\n", host)):
        said.write_text(text)
        assert memory.device_memory("cpu") == expected


def test_a_plan_under_torchrun_shares_the_host_as_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    alone = memory.own_memory("cpu")
    assert alone == memory.device_memory("cpu")
    torchrun = {"RANK": 0, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    assert memory.own_memory("cpu") == alone // 3
