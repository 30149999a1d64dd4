"""Reduce gradients in few large asynchronous all-reduces that overlap the rest of the backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.ir import conversions
from fxdp.ir.graphs import reachable
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.notes import Cause, Reason, note, tensor_operands
from fxdp.ir.placements import P, Placement, R
from fxdp.ir.slots import Gradient
from fxdp.ir.types import NodeType, TensorType

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one gradient's elements, in one bucket."""

    gradient: int
    start: int
    stop: int


def cut_into_buckets(sizes: list[int], bucket: int) -> list[list[Piece]]:
    """Cut the concatenation of gradients into buckets of `bucket` elements; the last may be smaller.

    A gradient may be cut between two buckets, so their number is exactly `ceil(sum(sizes) / bucket)`.

        sizes  [3, 4, 2], bucket 5
        grads  aaabbbbcc
        cuts   aaabb|bbcc
    """
    buckets: list[list[Piece]] = []
    room = 0
    for gradient, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = bucket
            stop = min(size, start + room)
            buckets[-1].append(Piece(gradient, start, stop))
            room -= stop - start
            start = stop
    return buckets


@dataclass(frozen=True, slots=True)
class _Reduction:
    """An all-reduce whose result serves parameter gradients only."""

    value: fx.Node
    pending: fx.Node
    done: fx.Node

    @property
    def type(self) -> TensorType:
        type_ = note(self.value).type
        assert isinstance(type_, TensorType)
        return type_


def _deferrable(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose results flow, without another conversion, into gradients alone."""
    result = graph.output_node()
    results = zip(result.args[0], note(result).results, strict=True)  # type: ignore[arg-type]
    bad = {value for value, slot in results if not isinstance(slot, Gradient)}
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in bad or not node.users:
            continue
        if all(
            user is result or (user in found and user.target not in conversions.CONVERSIONS)
            for user in node.users
        ):
            found.add(node)
    return found


def _reductions(graph: fx.Graph, deferrable: set[fx.Node]) -> list[_Reduction]:
    found = []
    for node in graph.nodes:
        if node.target is conversions.all_reduce and node.args[1] == "sum" and not node.kwargs:
            (done,) = node.users
            if done in deferrable:
                found.append(_Reduction(node.args[0], node, done))
    return found


def _is_static(reduction: _Reduction) -> bool:
    return all(isinstance(n, int) for n in reduction.type.shape)


_Chosen: TypeAlias = list[tuple[_Reduction, Piece]]
"""The pieces of one bucket."""


class _Bucketing:
    """Rewrites one graph."""

    def __init__(self, graph: fx.Graph, bucket_bytes: int) -> None:
        self.graph = graph
        self.bucket_bytes = bucket_bytes
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.tail: dict[fx.Node, fx.Node] = {}
        self.flat: dict[_Reduction, fx.Node] = {}

    def run(self) -> None:
        deferrable = _deferrable(self.graph)
        reductions = _reductions(self.graph, deferrable)
        after = self._downstream({r.done for r in reductions})
        bucketed = [r for r in reductions if _is_static(r)]
        by_dtype: dict[torch.dtype, list[_Reduction]] = {}
        for reduction in bucketed:
            by_dtype.setdefault(reduction.type.dtype, []).append(reduction)
        starts = [b for dtype, members in by_dtype.items() for b in self._start(dtype, members)]
        output = self.graph.output_node()
        for reduction in reductions:
            if not _is_static(reduction):
                output.prepend(reduction.done)
        self._finish(bucketed, starts, output)
        for node in after:
            output.prepend(node)
        for reduction in bucketed:
            self.graph.erase_node(reduction.done)
            self.graph.erase_node(reduction.pending)

    def _downstream(self, roots: set[fx.Node]) -> list[fx.Node]:
        """All that is computed from the reduced values, in order, the roots aside."""
        reached = reachable(roots) - roots
        return [n for n in self.graph.nodes if n in reached and n.op == "call_function"]

    def _start(self, dtype: torch.dtype, members: list[_Reduction]) -> list[tuple[fx.Node, _Chosen]]:
        members = sorted(members, key=lambda r: self.position[r.value])
        sizes = [prod(r.type.shape) for r in members]
        started = []
        for pieces in cut_into_buckets(sizes, max(1, self.bucket_bytes // dtype.itemsize)):
            chosen = [(members[p.gradient], p) for p in pieces]
            started.append((self._start_one(dtype, chosen), chosen))
        return started

    def _start_one(self, dtype: torch.dtype, chosen: _Chosen) -> fx.Node:
        last = max((r.value for r, _ in chosen), key=self.position.__getitem__)
        pieces = [self._piece(last, reduction, piece) for reduction, piece in chosen]
        total = sum(p.stop - p.start for _, p in chosen)
        bucket = pieces[0] if len(pieces) == 1 else self._add(last, aten.cat.default, (pieces,), dtype, total)
        pending = self._add(last, conversions.all_reduce, (bucket, "sum"), dtype, total)
        note(pending).placement = R
        note(pending).cause = _bucket_cause(chosen)
        return pending

    def _piece(self, last: fx.Node, reduction: _Reduction, piece: Piece) -> fx.Node:
        """The piece as a flat value; a gradient is flattened once, where it is made."""
        size, dtype = prod(reduction.type.shape), reduction.type.dtype
        flat = self.flat.get(reduction)
        if flat is None:
            value = reduction.value
            flat = self.flat[reduction] = self._add(value, aten.reshape.default, (value, [size]), dtype, size)
        if piece.stop - piece.start == size:
            return flat
        bounds = (0, piece.start, piece.stop)
        return self._add(last, aten.slice.Tensor, (flat, *bounds), dtype, piece.stop - piece.start)

    def _add(
        self, where: fx.Node, target: Any, args: tuple[Any, ...], dtype: torch.dtype, size: int
    ) -> fx.Node:
        """A node after `where` and all that was added there before."""
        with self.graph.inserting_after(self.tail.get(where, where)):
            made = self.graph.call_function(target, args)
        self.tail[where] = made
        _describe(made, TensorType(dtype, (size,)), P)
        return made

    def _finish(
        self, bucketed: list[_Reduction], starts: list[tuple[fx.Node, _Chosen]], output: fx.Node
    ) -> None:
        parts: dict[_Reduction, list[fx.Node]] = {}
        with self.graph.inserting_before(output):
            for pending, chosen in starts:
                done = self.graph.call_function(conversions.wait, (pending,))
                _describe(done, note(pending).type, R)
                offset = 0
                for reduction, piece in chosen:
                    size = piece.stop - piece.start
                    part = self.graph.call_function(aten.slice.Tensor, (done, 0, offset, offset + size))
                    _describe(part, TensorType(reduction.type.dtype, (size,)), R)
                    parts.setdefault(reduction, []).append(part)
                    offset += size
            wholes = {r.done: self._whole(r, parts.get(r)) for r in bucketed}
        # at once: replacing the output's many arguments one by one would take quadratic time
        output.args = (tuple(wholes.get(value, value) for value in output.args[0]),)  # type: ignore[arg-type,union-attr]
        for done, whole in wholes.items():
            done.replace_all_uses_with(whole)

    def _whole(self, reduction: _Reduction, pieces: list[fx.Node] | None) -> fx.Node:
        if pieces is None:  # the gradient has no elements, so it is whole already
            empty = self.graph.call_function(aten.zeros_like.default, (reduction.value,))
            _describe(empty, reduction.type, R, operands=(None,))
            return empty
        whole = pieces[0]
        if len(pieces) > 1:
            whole = self.graph.call_function(aten.cat.default, (pieces,))
            _describe(whole, TensorType(reduction.type.dtype, (prod(reduction.type.shape),)), R)
        shaped = self.graph.call_function(aten.view.default, (whole, list(reduction.type.shape)))
        _describe(shaped, reduction.type, R)
        return shaped


def _describe(
    node: fx.Node, type_: NodeType, placement: Placement, operands: tuple[Placement | None, ...] | None = None
) -> None:
    """A node of the bucketing: its operands are P where the result is, R where that is."""
    known = note(node)
    known.type, known.placement, known.backward = type_, placement, True
    known.operands = (placement,) * len(tensor_operands(node)) if operands is None else operands
    known.reason = Reason("bucket", known.operands)


def _bucket_cause(chosen: _Chosen) -> Cause:
    """The causes of the bucket's gradients in one line, at the source line of the first."""
    causes = [cause for reduction, _ in chosen if (cause := note(reduction.pending).cause) is not None]
    first, last = causes[0], causes[-1]
    if len(causes) == 1:
        return replace(first, gradient=True)
    text = f"{len(causes)} gradients: {first.text} to {last.text.removeprefix('gradient of ')}"
    return Cause("output", first.producer, first.site, text, gradient=True)


@dataclass(frozen=True)
class BucketGradients:
    """After it gradient reductions are `ceil(bytes / bucket)` all-reduces per dtype, waited for at the end.

    before: `%all_reduce = all_reduce(%mm, sum)` per parameter, each followed by its `wait`
    after:  `%all_reduce_9 = all_reduce(%cat, sum)` right after the bucket's last gradient is made, and one
            `wait` per bucket before the results are cut out of it as views

    Parameters
    ----------
    bucket_bytes : the size of a bucket.
    """

    bucket_bytes: int = 25 * 1024 * 1024

    name = "bucket-gradients"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size > 1:
            _Bucketing(gm.graph, self.bucket_bytes).run()
        return gm
