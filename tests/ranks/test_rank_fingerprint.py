from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxdp
from fxdp.ranks.comms.processors import processor
from fxdp.ranks.rank_fingerprint import changes, fingerprint, unlike_ranks
from tests.rank_pool import RankPool


def test_all_values_that_differ_are_told_with_their_ranks() -> None:
    own = {"vector instructions": "AVX2", "threads": "1", "torch": "2.13.0"}
    assert unlike_ranks([own] * 4) == []
    rows = [own, own, own | {"threads": "2"}, own | {"vector instructions": "AVX512"}, own | {"threads": "2"}]
    assert unlike_ranks(rows) == [
        "vector instructions: AVX512 on rank 3, AVX2 on the other ranks",
        "threads: 2 on ranks 2, 4, 1 on the other ranks",
    ]
    assert changes(own, own) == []
    now = own | {"threads": "2", "block": "4"}
    assert changes(own, now) == ["threads: 1, now 2", "block: not told, now 4"]


def test_a_switch_of_the_kernels_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fingerprint("cpu")
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "medium")
    assert changes(own, fingerprint("cpu")) == ["float32 matmul precision: highest, now medium"]


def _on_own_machine() -> str:
    """Return what this rank is told: rank 1 has another processor and torch, rank 2 more threads."""
    compiled = fxdp.compile(nn.Linear(3, 2), numerics=fxdp.Bitwise(block=2), backend="eager")
    before, rank = torch.get_num_threads(), dist.get_rank()
    torch.set_num_threads(1 + rank // 2)
    own = processor("cpu")
    other = own | {"vector instructions": "NEON", "torch": "2.9.9"} if rank == 1 else own
    try:
        with (
            mock.patch("fxdp.ranks.rank_fingerprint.processor", return_value=other),
            pytest.raises(fxdp.AgreementError) as caught,
        ):
            compiled(torch.randn(2, 3))
    finally:
        torch.set_num_threads(before)
    return str(caught.value)


def test_ranks_on_other_machines_are_refused_before_the_first_step(ranks: RankPool) -> None:
    for text in ranks.run(3, _on_own_machine):
        assert "\n  threads: 2 on rank 2, 1 on the other ranks\n" in text
        assert "\n  vector instructions: NEON on rank 1, " in text
        assert "\n  torch: 2.9.9 on rank 1, " in text
