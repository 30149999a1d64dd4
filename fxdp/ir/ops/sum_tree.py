"""Sum the values of blocks in one binary tree over the blocks' numbers, on whatever ranks the blocks are.

    blocks     0   1   2   3   4   5   6     node (level, index) sums blocks index * 2**level onwards
    level 1    (1, 0)  (1, 1)  (1, 2)  |     a block without a right neighbour goes up as it is
    level 2    (2, 0)--------  (2, 1)---
    level 3    (3, 0)-------------------

Each rank merges the nodes whose blocks it holds. With blocks 0 to 4 on rank 0 and 5, 6 on rank 1 these roots
are left, which the ranks exchange to finish the same tree:

    rank 0     (2, 0), (0, 4)                rank 1     (0, 5), (1, 3)

Empty parts are left out and not added as zeros, because -0 + 0 is +0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fxdp.ir.ops.moments import combine
from fxdp.ir.ops.parameter_shards import packed_shards

Node: TypeAlias = tuple[int, int]
"""Level and index of a node of the tree."""
_T = TypeVar("_T")

_c10d = torch.ops._c10d_functional


class SumTree(Generic[_T]):
    """The tree over a number of blocks, filled in any order.

    `merge(left, right, own)` returns the sum of two nodes; with `own`, `left` is itself such a sum, and may
    be overwritten.
    """

    def __init__(self, blocks: int, merge: Callable[[_T, _T, bool], _T]) -> None:
        self._blocks = blocks
        self._merge = merge
        self._found: dict[Node, tuple[_T, bool]] = {}

    def add(self, node: Node, value: _T) -> None:
        """Add the value of a node, and merge upwards as far as siblings are there."""
        (level, index), own = node, False
        while 1 << level < self._blocks:
            sibling = level, index ^ 1
            if sibling in self._found:
                there, owned = self._found.pop(sibling)
                left, right, mine = (there, value, owned) if index & 1 else (value, there, own)
                value, own = self._merge(left, right, mine), True
            elif (index + 1) << level < self._blocks or index & 1:
                break  # the sibling comes later, or is on another rank
            level, index = level + 1, index >> 1
        self._found[level, index] = value, own

    def roots(self) -> dict[Node, _T]:
        """Return the nodes that are not merged any further, by their first block."""
        order = sorted(self._found, key=lambda node: node[1] << node[0])
        return {node: self._found[node][0] for node in order}


def roots_of(first: int, count: int, blocks: int) -> tuple[Node, ...]:
    """Return the roots of a rank that holds `count` blocks from `first` on, of `blocks` in all."""
    tree = SumTree[None](blocks, lambda left, right, own: None)
    for block in range(first, first + count):
        tree.add((0, block), None)
    return tuple(tree.roots())


class RankRoots(NamedTuple):
    """The roots of all data ranks, for the ops below; a tuple, so that code of a graph can spell it.

    Attributes
    ----------
    ranks : the roots of each rank.
    rank : the index of this rank.
    blocks : the number of blocks of all ranks.
    """

    ranks: tuple[tuple[Node, ...], ...]
    rank: int
    blocks: int

    @classmethod
    def of(cls, batches: Sequence[int], block: int, rank: int) -> RankRoots:
        """Return the roots for the ranks' batches, which cut no block."""
        ends = [-(-end // block) for end in accumulate(batches, initial=0)]
        own = (roots_of(a, b - a, ends[-1]) for a, b in pairwise(ends))
        return cls(tuple(own), rank, ends[-1])

    @property
    def own(self) -> tuple[Node, ...]:
        """The roots of this rank."""
        return self.ranks[self.rank]


def start_tree_sum(values: Sequence[Tensor], roots: RankRoots, group: str) -> Tensor:
    """Start the sum of all ranks' roots; `finish_tree_sum` returns the sum on every rank.

    `values` are the roots of this rank, or, if it has none, one value of their type that is not counted.
    """
    world = len(roots.ranks)
    each = _chunk(values[0], world)
    rows = values[0].new_zeros((len(roots.own), world * each))
    for row, value in zip(rows, values, strict=False):
        row[: value.numel()] = value.reshape(-1)
    return _exchange(rows.view(-1, world, each), roots, group)


def finish_tree_sum(pending: Tensor, like: Tensor, roots: RankRoots, group: str) -> Tensor:
    """Wait for the roots of one chunk, finish its tree, and return all chunks in the shape of `like`."""
    world = len(roots.ranks)
    total = _finished(pending, like, _chunk(like, world), roots)
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(total, world, group))
    return gathered[: like.numel()].view(like.shape)  # type: ignore[no-any-return]


def start_tree_moments(values: Sequence[Tensor], roots: RankRoots, group: str) -> Tensor:
    """Start gathering all ranks' roots of moments `[3, *kept]`, which every rank gets in full."""
    rows = torch.stack([value.reshape(-1) for value in values])[: len(roots.own)]
    return _exchange(rows[:, None].expand(-1, len(roots.ranks), -1), roots, group)


def finish_tree_moments(pending: Tensor, like: Tensor, roots: RankRoots) -> Tensor:
    """Wait for the roots of moments and combine them, in the shape of `like`."""
    got = _received(pending, like, like.numel())
    return _merged([row.view(like.shape) for row in got], roots, _combined)


def _combined(left: Tensor, right: Tensor, own: bool) -> Tensor:
    """Return the moments of the union of two parts."""
    return combine(torch.stack([left, right]))


def start_tree_scatter(
    values: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    roots: RankRoots,
    group: str,
    after: Sequence[Tensor],
) -> Tensor:
    """Start the sum of all ranks' roots, each a list of values, of which every rank gets shards.

    `sizes` are the elements of each value's shard, padding included; `after` must be ready before the start.
    """
    rows = values[0][0].new_empty((len(roots.own), len(roots.ranks), sum(sizes)))
    for row, root in zip(rows, values, strict=False):
        packed_shards(root, row)
    return _exchange(rows, roots, group)


def finish_tree_scatter(pending: Tensor, like: Tensor, sizes: Sequence[int], roots: RankRoots) -> Tensor:
    """Wait for the roots of this rank's shards and finish their tree; `like` has their dtype."""
    return _finished(pending, like, sum(sizes), roots)


def _chunk(value: Tensor, ranks: int) -> int:
    """Return the elements of a rank's chunk."""
    return max(1, -(-value.numel() // ranks))


def _exchange(rows: Tensor, roots: RankRoots, group: str) -> Tensor:
    """Send `rows[root, rank]` to each rank, which gets a row of every root."""
    own, world, each = rows.shape
    sent = rows.transpose(0, 1).contiguous().view(-1).view(torch.uint8)
    size = each * rows.itemsize
    got = [len(nodes) * size for nodes in roots.ranks]
    return _c10d.all_to_all_single(sent, got, [own * size] * world, group)  # type: ignore[no-any-return]


def _finished(pending: Tensor, like: Tensor, each: int, roots: RankRoots) -> Tensor:
    got = _received(pending, like, each)
    return _merged(list(got), roots, lambda left, right, own: left.add_(right)).contiguous()


def _received(pending: Tensor, like: Tensor, each: int) -> Tensor:
    return _c10d.wait_tensor(pending).view(like.dtype).view(-1, each)  # type: ignore[no-any-return]


def _merged(
    values: Sequence[Tensor], roots: RankRoots, merge: Callable[[Tensor, Tensor, bool], Tensor]
) -> Tensor:
    tree = SumTree[Tensor](roots.blocks, merge)
    for node, value in zip([node for nodes in roots.ranks for node in nodes], values, strict=True):
        tree.add(node, value)
    (total,) = tree.roots().values()
    return total


for _start in (start_tree_sum, start_tree_moments, start_tree_scatter):
    torch.fx.node.has_side_effect(_start)  # all ranks wait for one another
