"""Reduce gradients in few large asynchronous all-reduces that overlap the rest of the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.gradient_tails import computed_after, deferrable
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, meta, tensor_type
from fxdp.ir.graph.packing import Packing, elements
from fxdp.ir.graph.parameter_buckets import gradients_cause
from fxdp.ir.network.link_cost import LARGEST, bucket_of, in_memory
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import TensorType, is_static
from fxdp.pipeline.cut.cost import node_flops


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of one gradient's elements, inside one bucket."""

    gradient: int
    start: int
    stop: int


def _cut_into_buckets(sizes: list[int], bucket: int) -> list[list[_Piece]]:
    """Cut the concatenation of gradients into buckets of `bucket` elements; the last may be smaller.

    A gradient may be cut between two buckets, so there are exactly `ceil(sum(sizes) / bucket)` buckets.

        sizes  [3, 4, 2], bucket 5
        grads  aaabbbbcc
        cuts   aaabb|bbcc
    """
    buckets: list[list[_Piece]] = []
    room = 0
    for gradient, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = bucket
            stop = min(size, start + room)
            buckets[-1].append(_Piece(gradient, start, stop))
            room -= stop - start
            start = stop
    return buckets


@dataclass(frozen=True, slots=True)
class _Reduction:
    """An all-reduce whose result only parameter gradients depend on."""

    value: fx.Node
    pending: fx.Node
    done: fx.Node

    @property
    def type(self) -> TensorType:
        return tensor_type(self.value)

    @property
    def axis(self) -> str | None:
        return redistributions.axis_of(self.pending)


def _reductions(graph: fx.Graph, deferred: set[fx.Node]) -> list[_Reduction]:
    found = []
    for node in graph.nodes:
        if node.target is redistributions.all_reduce and node.args[1] == "sum":
            (done,) = node.users
            if done in deferred:
                found.append(_Reduction(node.args[0], node, done))
    return found


def _waits_ahead(graph: fx.Graph, gradients: list[_Reduction]) -> dict[fx.Node, fx.Node]:
    """Map each node before an all-reduce that the backward needs (BatchNorm's) to the wait for its result.

    A bucket started before that all-reduce would delay the backward. Started after its wait, the bucket
    overlaps the computation of the next layer:

        convolution 3 | (bucket) | sums of its BatchNorm | wait | bucket | convolution 2 ...
    """
    own = {reduction.pending for reduction in gradients}
    waits = {
        n: next(iter(n.users))
        for n in graph.find_nodes(op="call_function", target=redistributions.all_reduce)
        if meta(n).backward and n not in own
    }  # fmt: skip
    ends = set(waits.values())
    ahead: dict[fx.Node, fx.Node] = {}
    wait: fx.Node | None = None
    in_flight = False
    for node in reversed(graph.nodes):
        if wait is not None:
            ahead[node] = wait
        if node in waits:
            wait, in_flight = waits[node], False
        elif node in ends:
            wait, in_flight = node, True  # work before its wait overlaps it: no layer of its own
        elif node.op == "call_function" and node_flops(node) and not in_flight:
            wait = None  # a layer's work, which can overlap a bucket
    return ahead


_Chosen: TypeAlias = list[tuple[_Reduction, _Piece]]
"""The pieces of one bucket, with their reductions."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket in flight."""

    packing: Packing
    pending: fx.Node
    chosen: _Chosen


class _Bucketing:
    """Rewrite of one graph: start a reduction per bucket, and wait for all at the end."""

    def __init__(self, graph: fx.Graph, bucket_bytes: int | None, mesh: Mesh) -> None:
        self.graph = graph
        self.bucket_bytes = bucket_bytes
        self.link = mesh.link
        self.in_memory = mesh.shared_memory
        self.ahead: dict[fx.Node, fx.Node] = {}
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.tail: dict[fx.Node, fx.Node] = {}
        self.flat: dict[_Reduction, fx.Node] = {}

    def run(self) -> None:
        reductions = _reductions(self.graph, deferrable(self.graph))
        after = computed_after(self.graph, {r.done for r in reductions})
        if self.link is not None:
            self.ahead = _waits_ahead(self.graph, reductions)
        bucketed = [r for r in reductions if is_static(r.type)]
        alike: dict[tuple[torch.dtype, str | None], list[_Reduction]] = {}
        for reduction in bucketed:
            alike.setdefault((reduction.type.dtype, reduction.axis), []).append(reduction)
        starts = [b for (dtype, axis), members in alike.items() for b in self._start(dtype, axis, members)]
        output = self.graph.output_node()
        for reduction in reductions:
            # of a dynamic size, which no bucket can count: reduced alone
            if not is_static(reduction.type):
                output.prepend(reduction.done)
        self._finish(bucketed, starts, output)
        for node in after:
            output.prepend(node)
        for reduction in bucketed:
            self.graph.erase_node(reduction.done)
            self.graph.erase_node(reduction.pending)

    def _start(self, dtype: torch.dtype, axis: str | None, members: list[_Reduction]) -> list[_Bucket]:
        packing = Packing(self.graph, "bucket", backward=True, axis=axis)
        members = sorted(members, key=lambda r: self.position[r.value])
        sizes = [elements(r.type) for r in members]
        total = sum(sizes) * dtype.itemsize
        largest = in_memory(total) if self.in_memory else LARGEST
        bucket = bucket_of(total, self.bucket_bytes, self.link, largest)
        started = []
        for pieces in _cut_into_buckets(sizes, max(1, bucket // dtype.itemsize)):
            chosen = [(members[p.gradient], p) for p in pieces]
            started.append(_Bucket(packing, self._start_one(packing, chosen), chosen))
        return started

    def _start_one(self, packing: Packing, chosen: _Chosen) -> fx.Node:
        last = max((r.value for r, _ in chosen), key=self.position.__getitem__)
        last = self.ahead.get(last, last)
        pieces = [self._piece(packing, last, reduction, piece) for reduction, piece in chosen]
        bucket = pieces[0]
        if len(pieces) > 1:
            bucket = self._after(last, lambda: packing.side_by_side(pieces))
        return self._after(last, lambda: packing.reduce(bucket, _bucket_cause(chosen)))

    def _piece(self, packing: Packing, last: fx.Node, reduction: _Reduction, piece: _Piece) -> fx.Node:
        """Return a piece as a flat value; each gradient is flattened once, right after its computation."""
        flat = self.flat.get(reduction)
        if flat is None:
            value = reduction.value
            flat = self.flat[reduction] = self._after(value, lambda: packing.flat(value))
        if piece.stop - piece.start == elements(reduction.type):
            return flat
        return self._after(last, lambda: packing.piece(flat, piece.start, piece.stop))

    def _after(self, where: fx.Node, write: Callable[[], fx.Node]) -> fx.Node:
        """Insert a node after `where` and after everything that was inserted there before."""
        with self.graph.inserting_after(self.tail.get(where, where)):
            made = self.tail[where] = write()
        return made

    def _finish(self, bucketed: list[_Reduction], starts: list[_Bucket], output: fx.Node) -> None:
        parts: dict[_Reduction, list[fx.Node]] = {}
        with self.graph.inserting_before(output):
            for bucket in starts:
                done, offset = bucket.packing.wait(bucket.pending), 0
                for reduction, piece in bucket.chosen:
                    stop = offset + piece.stop - piece.start
                    parts.setdefault(reduction, []).append(bucket.packing.piece(done, offset, stop))
                    offset = stop
            packing = Packing(self.graph, "bucket", backward=True)
            fulls = {r.done: _full(packing, r, parts.get(r)) for r in bucketed}
        # at once: replacing the output's many arguments one by one would take quadratic time
        output.args = (tuple(fulls.get(value, value) for value in output.args[0]),)  # type: ignore[arg-type,union-attr]
        for done, full in fulls.items():
            done.replace_all_uses_with(full)


def _full(packing: Packing, reduction: _Reduction, pieces: list[fx.Node] | None) -> fx.Node:
    if pieces is None:  # the gradient has no elements, so it is complete already
        return packing.zeros(reduction.value)
    full = pieces[0] if len(pieces) == 1 else packing.side_by_side(pieces)
    return packing.shaped(full, reduction.type)


def _bucket_cause(chosen: _Chosen) -> Cause:
    """Join the causes of the bucket's gradients to one cause, at the source line of the first."""
    causes = [cause for reduction, piece in chosen if (cause := _cause(reduction, piece)) is not None]
    return replace(gradients_cause(causes), gradient=True)


def _cause(reduction: _Reduction, piece: _Piece) -> Cause | None:
    """Return the cause of a gradient's reduction, with the number of elements of a partial piece."""
    cause, size = meta(reduction.pending).cause, piece.stop - piece.start
    if cause is None or size == elements(reduction.type):
        return cause
    return replace(cause, elements=size)


@dataclass(frozen=True)
class BucketGradients:
    """Reduce gradients in `ceil(bytes / bucket_bytes)` all-reduces per dtype, with all waits at the end.

    before: `%all_reduce = all_reduce(%mm, sum)` per parameter, each followed by its `wait`
    after:  `%all_reduce_9 = all_reduce(%cat, sum)` right after the bucket's last gradient, and one
            `wait` per bucket before the results are sliced from it as views

    Parameters
    ----------
    bucket_bytes : the size of a bucket. None: 25 MiB, or the size given by `in_memory` where ranks share
        memory, or over a network a size that suits its speed. Reductions along different axes go into
        different buckets.
    """

    bucket_bytes: int | None = None

    name = "bucket-gradients"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size > 1:
            _Bucketing(gm.graph, self.bucket_bytes, mesh).run()
        return gm
