"""Which values number packed samples, none of which two ranks share.

position_ids                    positions      by contract: each rank's part begins with a 0
diff(position_ids) != 1         borders        True where a sample begins, so at the first row of a rank
position_ids == 0               borders
borders.cumsum(-1)              numbers        equal in rows of one sample, so on one rank alone
row numbers                     apart          equal on one rank alone, by contract
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
from fxdp.placing.pointers import READS, may_round, moved_operands, moved_shard
from fxdp.placing.row_counts import first_rows, later_rows
from fxdp.rules.registry import Pointer


class _Apart(NamedTuple):
    """Fact about a value: equal elements are on one rank alone, if the ranks have its parts under `shard`.

    `of` is where all elements are from, an axis or a node: so are elements of two values of one origin. If
    `numbers` is known, equal elements are in rows of one sample alone, of those that it numbers.
    """

    of: str | fx.Node
    shard: Shard
    numbers: fx.Node | None = None


class Positions(NamedTuple):
    """Fact about a value: it counts the rows of each sample from 0, as the input `of` does."""

    of: fx.Node
    shard: Shard


@dataclass(slots=True)
class PackedSamples:
    """What is known of positions within samples, and of numbers of samples."""

    pointers: Mapping[fx.Node, Pointer]
    iota: Mapping[fx.Node, int]
    positions: dict[fx.Node, Positions] = field(default_factory=dict)
    apart: dict[fx.Node, _Apart] = field(default_factory=dict)
    origins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The positions by which numbers of samples were counted."""
    _borders: dict[fx.Node, Positions] = field(default_factory=dict)

    def learn(self, node: fx.Node, *, is_number: bool) -> None:
        """Find out what is known of a tensor from what is known of earlier ones.

        `is_number` says that the row numbers in it are those of each row's sample.
        """
        if (found := self._apart(node, is_number)) is not None:
            self.apart[node] = found
        elif (moved := self._moved(node, self.positions)) is not None:
            self.positions[node] = moved
        elif (border := self._border(node) or self._moved(node, self._borders)) is not None:
            self._borders[node] = border

    def dims_apart(self, first: Any, second: Any) -> tuple[int, int] | None:
        """Return the dims along which elements of two values are equal on one rank alone; None: of none."""
        a, b = self.apart.get(first), self.apart.get(second)
        if a is None or b is None or a.of != b.of:
            return None
        sizes = (tensor_type(value).shape[fact.shard.dim] for value, fact in ((first, a), (second, b)))
        return (a.shard.dim, b.shard.dim) if all(map(is_axis, sizes)) else None

    def _border(self, node: fx.Node) -> Positions | None:
        if node.target is aten.eq.Scalar and node.args[1] == 0:
            return self.positions.get(node.args[0])  # type: ignore[arg-type]
        # a position 0 is no successor, whatever is before
        return self._step(node.args[0]) if node.target is aten.ne.Scalar and node.args[1] == 1 else None

    def _step(self, node: Any) -> Positions | None:
        """Return the positions, if a node is their difference to those one row before."""
        if node.target is not aten.sub.Tensor or node.kwargs:
            return None
        (joined, dim), before = later_rows(node.args[0]), first_rows(node.args[1])
        if joined is None or before != (joined, dim) or joined.target is not aten.cat.default:
            return None
        parts: Any = joined.args[0]
        if len(parts) != 2 or tensor_type(parts[0]).shape[dim] != 1:
            return None
        found = self.positions.get(parts[1])
        return found if found is not None and found.shard == Shard(dim) else None

    def _apart(self, node: fx.Node, is_number: bool) -> _Apart | None:
        moved = moved_operands(node)
        before = self.apart.get(moved[0]) if len(moved) == 1 else None
        numbers = before.numbers if before is not None and self._keeps_order(node) else None
        if (into := self.pointers.get(node)) is not None and into.per == 1:
            return _Apart(into.axis, into.shard, node if is_number else numbers)
        if may_round(node) or not node.args:
            return None
        args: Any = node.args
        if node.target is aten.cumsum.default and args[0] in self._borders:
            counted = self._borders[args[0]]
            if counted.shard.dim != args[1] % len(tensor_type(node).shape):
                return None
            self.origins[node] = counted.of
            return _Apart(node, counted.shard, node)
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(args[1], int):
            known = self.apart.get(args[0])
            return None if known is None else known._replace(of=node)
        if before is None:
            return None
        shard = moved_shard(node, {moved[0]: before.shard}, self.pointers)
        return None if shard is None else _Apart(before.of, shard, numbers)

    def _moved(self, node: fx.Node, known: Mapping[fx.Node, Positions]) -> Positions | None:
        """Return that a result has the elements of one operand, on each rank those of its part, in order."""
        moved = moved_operands(node)
        if len(moved) != 1 or moved[0] not in known or not self._keeps_order(node):
            return None
        shard = moved_shard(node, {moved[0]: known[moved[0]].shard}, self.pointers)
        return None if shard is None else known[moved[0]]._replace(shard=shard)

    def _keeps_order(self, node: fx.Node) -> bool:
        """Return whether rows of a rank stay in order: only a read at numbers of rows may change it."""
        read_at = (n for n in node.all_input_nodes[1:] if n in self.pointers)
        return node.target not in READS or all(n in self.iota for n in read_at)
