"""The rounds of a step over blocks, and the parts in which they run."""

from __future__ import annotations

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


def _cut() -> Program:
    return program(Norm(), torch.randn(8, 4), torch.rand(8), dp=2, numerics={"block": 2})


def test_what_blocks_wait_for_ends_a_round() -> None:
    lines = []
    for number, one in enumerate(_cut().partition.rounds):
        for name, part in (("blocks", one.blocks), ("once", one.exchange)):
            assert part is not None
            reads = " ".join(spec.name for spec in part.reads)
            lines.append(f"{number} {name}: {reads} -> {' '.join(part.gives)}")
    assert_expected_inline("\n".join(lines), """\
0 blocks:  -> sum_3
0 once: sum_3 -> wait_2 div_2
1 blocks:  -> mm moments
1 once: moments -> select rsqrt
2 blocks: mm select rsqrt div_2 -> sum_2 mm_3 t_5 mul_5 div_3 div_4
2 once: div_3 div_4 -> wait_3 wait_4""")


def test_what_a_part_reads_an_earlier_one_gives() -> None:
    partition = _cut().partition
    given: set[str] = set()
    rounds = [part for one in partition.rounds for part in (one.blocks, one.exchange)]
    for part in (*rounds, *partition.parts, *partition.epilogues):
        assert part is not None
        assert {spec.name for spec in part.reads} <= given
        given |= set(part.gives)
    assert {name for _, name, _ in partition.results} <= given
