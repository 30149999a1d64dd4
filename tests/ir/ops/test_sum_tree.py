from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxdp.ir.ops.sum_tree import Node, RankRoots, SumTree, roots_of


def _add(left: Tensor, right: Tensor, own: bool) -> Tensor:
    return left.add_(right) if own else left + right


def test_roots_are_what_no_sibling_on_the_rank_completes() -> None:
    assert roots_of(0, 8, 8) == ((3, 0),)
    assert roots_of(0, 5, 7) == ((2, 0), (0, 4))
    assert roots_of(5, 2, 7) == ((0, 5), (1, 3))  # block 6 has no right sibling: it goes up
    assert roots_of(3, 0, 7) == ()
    roots = RankRoots.of([9, 0, 5], 3, 2)
    assert roots.ranks == (((1, 0), (0, 2)), (), ((0, 3), (2, 1)))
    assert roots.blocks == 5
    assert roots.own == roots.ranks[2]


def test_any_split_and_any_order_have_the_bits_of_one_rank() -> None:
    torch.manual_seed(0)
    for blocks in range(1, 12):
        drawn = torch.randn(blocks, 50).mul(torch.randn(blocks, 1).exp())
        values = list(drawn.clone().unbind())
        alone = SumTree[Tensor](blocks, _add)
        for i in torch.randperm(blocks).tolist():
            alone.add((0, i), values[i])
        (expected,) = alone.roots().values()
        for first in range(blocks + 1):
            joined = SumTree[Tensor](blocks, _add)
            for start, stop in ((0, first), (first, blocks)):
                own = SumTree[Tensor](blocks, _add)
                for i in reversed(range(start, stop)):
                    own.add((0, i), values[i])
                for node, value in own.roots().items():
                    joined.add(node, value)
            ((_, total),) = joined.roots().items()
            assert torch.equal(total, expected)
        assert torch.equal(torch.stack(values), drawn)  # only sums are overwritten


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.integers(1, 5), st.randoms())
def test_any_number_of_ranks_has_the_bits_of_one(counts: list[int], block: int, random: Random) -> None:
    batches = [count * block for count in counts]
    blocks = sum(counts)
    values = list(torch.randn(blocks, 7, generator=torch.Generator().manual_seed(blocks)).unbind())
    alone, joined = SumTree[Tensor](blocks, _add), SumTree[Tensor](blocks, _add)
    for i, value in enumerate(values):
        alone.add((0, i), value)
    received, first = list[tuple[Node, Tensor]](), 0
    for rank, count in enumerate(counts):
        own = SumTree[Tensor](blocks, _add)
        for i in range(first, first + count):
            own.add((0, i), values[i])
        roots = RankRoots.of(batches, block, rank)
        assert tuple(own.roots()) == roots.own
        assert len(roots.own) <= 2 * max(1, blocks.bit_length())
        received += own.roots().items()
        first += count
    random.shuffle(received)
    for node, value in received:
        joined.add(node, value)
    ((_, total),) = joined.roots().items()
    ((_, expected),) = alone.roots().items()
    assert torch.equal(total, expected)


def test_a_sum_of_negative_zeros_keeps_its_sign() -> None:
    tree = SumTree[Tensor](2, _add)
    for i in range(2):
        tree.add((0, i), torch.tensor(-0.0))
    ((_, total),) = tree.roots().items()
    assert torch.signbit(total)
