"""Which values are equal on one rank alone: numbers of packed samples, none of which two ranks share.

    position_ids                    positions      by contract: each rank's part begins with a 0
    diff(position_ids) != 1         a border       True at the first row of each rank's part
    (position_ids == 0)             a border
    border.cumsum(-1)               apart          equal values are on one rank alone
    row numbers                     apart          also by contract
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from fxdp.ir.graph.metadata import tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import is_axis
from fxdp.placing.neighbours import first_rows, later_rows
from fxdp.placing.pointers import may_round, moved_operands, moved_shard
from fxdp.rules.registry import Pointer


class Apart(NamedTuple):
    """Fact about a value: equal elements are on one rank alone, if the ranks have its parts under `shard`.

    `of` is where all elements are from, an axis or a node: elements of two values of one origin, too.
    """

    of: str | fx.Node
    shard: Shard


@dataclass(slots=True)
class PackedSamples:
    """What is known of positions within samples, and of numbers of samples."""

    positions: dict[fx.Node, Shard] = field(default_factory=dict)
    """Values that count the rows of each sample from 0."""
    borders: dict[fx.Node, Shard] = field(default_factory=dict)
    """Masks that are True at the first row of each rank's part."""
    apart: dict[fx.Node, Apart] = field(default_factory=dict)

    def learn(self, node: fx.Node, pointers: Mapping[fx.Node, Pointer]) -> None:
        """Find out what is known of a tensor from what is known of earlier ones."""
        if (found := self._apart(node, pointers)) is not None:
            self.apart[node] = found
        elif (shard := _moved(node, self.positions, pointers)) is not None:
            self.positions[node] = shard
        elif (shard := self._border(node) or _moved(node, self.borders, pointers)) is not None:
            self.borders[node] = shard

    def dims_apart(self, first: Any, second: Any) -> tuple[int, int] | None:
        """Return the dims along which elements of two values are equal on one rank alone; None: of none."""
        a, b = self.apart.get(first), self.apart.get(second)
        if a is None or b is None or a.of != b.of:
            return None
        sizes = (tensor_type(value).shape[fact.shard.dim] for value, fact in ((first, a), (second, b)))
        return (a.shard.dim, b.shard.dim) if all(map(is_axis, sizes)) else None

    def _border(self, node: fx.Node) -> Shard | None:
        if node.target is aten.eq.Scalar and node.args[1] == 0:
            return self.positions.get(node.args[0])  # type: ignore[arg-type]
        # a position 0 is no successor, whatever is before
        return self._step(node.args[0]) if node.target is aten.ne.Scalar and node.args[1] == 1 else None

    def _step(self, node: Any) -> Shard | None:
        """Return the shard of positions, if a node is their difference to those one row before."""
        if node.target is not aten.sub.Tensor or node.kwargs:
            return None
        (joined, dim), before = later_rows(node.args[0]), first_rows(node.args[1])
        if joined is None or before != (joined, dim) or joined.target is not aten.cat.default:
            return None
        parts: Any = joined.args[0]
        if len(parts) != 2 or tensor_type(parts[0]).shape[dim] != 1:
            return None
        return Shard(dim) if self.positions.get(parts[1]) == Shard(dim) else None

    def _apart(self, node: fx.Node, pointers: Mapping[fx.Node, Pointer]) -> Apart | None:
        if node in pointers:
            return Apart(*pointers[node])
        if may_round(node) or not node.args:
            return None
        args: Any = node.args
        if node.target is aten.cumsum.default:
            found = self.borders.get(args[0])
            along = args[1] % len(tensor_type(node).shape)
            return Apart(node, found) if found is not None and found.dim == along else None
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(args[1], int):
            known = self.apart.get(args[0])
            return None if known is None else Apart(node, known.shard)
        shard = _moved(node, {one: fact.shard for one, fact in self.apart.items()}, pointers)
        return None if shard is None else Apart(self.apart[moved_operands(node)[0]].of, shard)


def _moved(
    node: fx.Node, known: Mapping[fx.Node, Shard], pointers: Mapping[fx.Node, Pointer]
) -> Shard | None:
    """Return the shard of a result that has the elements of one operand, on each rank those of its part."""
    moved = moved_operands(node)
    if len(moved) != 1 or moved[0] not in known:
        return None
    return moved_shard(node, {moved[0]: known[moved[0]]}, pointers)
