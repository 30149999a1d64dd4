"""The rounds of a step over blocks, and the parts in which they run."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxdp.compiler.program import Program
from tests.pipeline.cut.cuts import program


class Norm(nn.Module):
    """A BatchNorm without weights, between two linear layers; the count of weights comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)
        self.norm = nn.BatchNorm1d(3, affine=False, track_running_stats=False)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.b(self.norm(self.a(x))).square().sum(1) * w).sum() / w.sum()


def _cut(ranks: int = 1) -> Program:
    options = {"numerics": {"block": 2}, "backend": "eager"}
    return program(Norm(), torch.randn(8, 4), torch.rand(8), ranks=ranks, dp=2, **options)


def _lines(ranks: int) -> str:
    return "\n".join(
        f"{one.name}: {' '.join(spec.name for spec in one.part.reads)} -> {' '.join(one.part.gives)}"
        for one in _cut(ranks).partition.in_rounds
    )


def test_what_blocks_wait_for_ends_a_round() -> None:
    assert_expected_inline(
        _lines(1),
        """\
round 0:  -> sum_3
exchange 0: sum_3 -> wait_2 div_2
round 1:  -> mm moments
exchange 1: moments -> select rsqrt
round 2: mm select rsqrt div_2 -> sum_2 mm_3 t_5 mul_5 div_3 div_4
exchange 2: div_3 div_4 -> wait_3 wait_4
round 3: rsqrt mm_3 mul_5 wait_3 wait_4 -> t_8""",
    )


def test_stages_take_turns_in_a_round() -> None:
    assert_expected_inline(
        _lines(2),
        """\
round 0 turn 0:  -> sum_3
exchange 0: sum_3 -> wait_2 div_2
round 1 turn 0:  -> mm moments
exchange 1: moments -> select rsqrt
round 2 turn 1: mm select rsqrt div_2 -> sum_2 mm_3 t_5
round 2 turn 2: mm select rsqrt mm_3 -> mul_5 div_3 div_4
exchange 2: div_3 div_4 -> wait_3 wait_4
round 3 turn 2: rsqrt mm_3 mul_5 wait_3 wait_4 -> t_8""",
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_part_reads_an_earlier_one_gives(ranks: int) -> None:
    partition = _cut(ranks).partition
    given: set[str] = set()
    rounds = [one.part for one in partition.in_rounds]
    for part in (*rounds, *filter(None, partition.epilogues[::-1])):
        assert {spec.name for spec in part.reads} <= given
        given |= set(part.gives)
    assert {name for _, name, _ in partition.results} <= given
