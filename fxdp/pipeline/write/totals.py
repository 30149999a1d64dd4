"""Write the sums over micro-batches: one running sum, or with blocks the part of a tree that the rank holds.

%total_loss = accumulate(%loss_mb0, %loss_mb1, 'sum', False)
%total_loss_1 = accumulate(%total_loss, %loss_mb2, 'sum', True)          in place

%loss_1_0 = accumulate(%loss_mb0, %loss_mb1, 'sum', False)               blocks 0 and 1: node (1, 0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from fxdp.ir.ops.parts import join_parts
from fxdp.ir.ops.sum_tree import SumTree
from fxdp.ir.types.born_axes import is_born
from fxdp.ir.types.placements import Partial, Shard
from fxdp.ir.types.sizes import axis_of, evaluate
from fxdp.pipeline.cut.partition import Partition
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.runtime import p2p


@dataclass
class Totals:
    """Writer of the values that micro-batches make together."""

    step: StepGraph
    partition: Partition
    layout: MicrobatchSizes
    _found: dict[str, dict[int, fx.Node]] = field(default_factory=dict)
    _summed: set[str] = field(default_factory=set)
    _trees: dict[str, SumTree[fx.Node]] = field(default_factory=dict)

    def add(self, name: str, microbatch: int, value: fx.Node) -> None:
        """Add the value of one micro-batch to its total."""
        placement = self.partition.totals[name].placement
        found = self._found.setdefault(name, {})
        if not found or isinstance(placement, Shard):
            found[microbatch] = value
        elif isinstance(placement, Partial) and not self._by_tree(placement):
            ((first, total),) = found.items()
            args = (total, value, placement.op, name in self._summed)
            self._summed.add(name)
            found[first] = self.step.function(self._accumulate, args, f"total_{name}")
        elif not isinstance(placement, Partial):  # equal in every micro-batch
            self._found[name] = {microbatch: value}
        if self._by_tree(placement) and not self.layout.is_empty:
            self._tree(name).add((0, self.layout.first + microbatch), value)

    def put_together(self, *, exchanged: bool = False) -> None:
        """Turn the totals so far into values of the step.

        With `exchanged` blocks go on from these values: on one data rank, too, each is in memory of its own.
        """
        for name, found in self._found.items():
            placement = self.partition.totals[name].placement
            value, *others = (found[microbatch] for microbatch in sorted(found))
            if isinstance(placement, Shard) and others:
                outer = evaluate(placement.outer, self.step.sizes[None])
                along = axis_of(self.partition.totals[name].type.shape[placement.dim])
                # of rows that data select, joined one after the other, no size is known
                is_known = along is None or not is_born(along)
                bounds = self.layout.along("" if along is None else along.name) if is_known else ()
                args = ([value, *others], placement.dim, outer, [size for _, size in bounds])
                value = self.step.function(join_parts, args, f"whole_{name}")
            # a rank without blocks has no roots, but a value of their shape
            roots = [*self._trees[name].roots().values()] if name in self._trees else [value]
            if exchanged and not self.step.parallel and isinstance(placement, Shard | Partial):
                given = roots[0] if self._by_tree(placement) else value
                value = self.step.function(p2p.aligned, (given,), f"aligned_{name}")
                roots = [value]
            self.step.keep(name, None, value)
            if self._by_tree(placement):
                self.step.keep_roots(name, tuple(roots))
        self._found.clear()

    def _by_tree(self, placement: object) -> bool:
        """Return whether the order of a sum counts; extrema and their signed zeros have none."""
        return self.layout.blocks is not None and placement in (Partial("sum"), Partial("moments"))

    @property
    def _accumulate(self) -> Callable[..., object]:
        return p2p.accumulate if self.layout.blocks is None else p2p.accumulate_in_any_order

    def _tree(self, name: str) -> SumTree[fx.Node]:
        if name not in self._trees:
            assert self.layout.blocks is not None
            self._trees[name] = SumTree(self.layout.blocks, partial(self._merge, name))
        return self._trees[name]

    def _merge(self, name: str, left: fx.Node, right: fx.Node, own: bool) -> fx.Node:
        placement = self.partition.totals[name].placement
        assert isinstance(placement, Partial)
        return self.step.function(p2p.accumulate, (left, right, placement.op, own), f"total_{name}")
