"""All-gather sharded parameters, and reduce-scatter their gradients, in a few large buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graphs import reachable, results_of
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, Metadata, meta, tensor_operands, tensor_type
from fxdp.ir.graph.packing import elements, placed_call
from fxdp.ir.graph.parameter_buckets import (
    causes_of,
    gathers_cause,
    gradients_cause,
    parameter_of,
    readers,
    scatter_steps,
    wait_of,
)
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.network.link_cost import IN_MEMORY, LARGEST, bucket_of, few_runs
from fxdp.ir.network.zero_copy_gathers import fills_pages_of_memory
from fxdp.ir.ops.parameter_shards import elements_each, shard_rows
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import TensorType, type_bytes
from fxdp.torch_compat import aten

_RULE = "rows"


@dataclass(frozen=True, slots=True)
class _Member:
    """The redistributions of one parameter's all-gather, or of one gradient's reduce-scatter, of `value`."""

    value: fx.Node
    steps: tuple[fx.Node, ...]
    """Each redistribution followed by the matching wait, in order; users of the last wait read the result."""
    first: int
    """The position of the first op that needs the value, which makes the bucket due."""
    last: int
    """The position of the phase's last op that reads the value; equal to `first` if `stays`."""
    stays: bool = False
    """True if the value outlives the phase."""

    @property
    def type(self) -> TensorType:
        return tensor_type(self.value)

    @property
    def axis(self) -> str | None:
        return redistributions.axis_of(self.steps[0])


_Key: TypeAlias = "tuple[torch.dtype, bool, str | None, bool, bool]"
"""Key of the members that may share a bucket: dtype, phase (True: backward), axis, whether they stay, pages.

A bucket's flat value lives as long as any member, so members that stay have buckets of their own. So do
parameters that fill entire pages of memory, because ranks can share these without a copy.
"""
_Bucket: TypeAlias = list[_Member]


def _gathers(graph: fx.Graph, position: Mapping[fx.Node, int]) -> list[_Member]:
    """Return the all-gathers of parameters, in the order of first use."""
    found = []
    for start in graph.find_nodes(op="call_function", target=redistributions.all_gather_shards):
        done = wait_of(start)
        reads = readers(done)
        at = [position[reader] for reader in reads]
        stays = any(r.op == "output" or meta(r).backward != meta(start).backward for r in reads)
        found.append(_Member(start.args[0], (start, done), min(at), min(at) if stays else max(at), stays))
    return sorted(found, key=lambda member: (member.first, position[member.steps[-1]]))


def _scatters(graph: fx.Graph, position: Mapping[fx.Node, int]) -> list[_Member]:
    """Return the reduce-scatters of gradients, in the order in which the gradients are computed."""
    found = []
    for start in graph.find_nodes(op="call_function", target=redistributions.reduce_scatter_shards):
        made = position[start.args[0]]
        # including reductions along another axis, which profit from buckets just as well
        found.append(_Member(start.args[0], tuple(scatter_steps(start)), made, made))
    return sorted(found, key=lambda member: member.first)


def _places(graph: fx.Graph, waits: set[fx.Node], mesh: Mesh) -> dict[fx.Node, int]:
    """Map each wait for a gradient shard, or a cast of one, to the position of the parameter in memory.

    Waits without a known parameter come last.
    """
    # in the order of shards in memory: parameters that fill pages first
    inputs = sorted(graph.find_nodes(op="placeholder"), key=lambda n: not _in_pages(n, mesh))
    position = {meta(n).spec: i for i, n in enumerate(inputs)}
    found = dict.fromkeys(waits, len(inputs))
    for spec, value in results_of(graph):
        if isinstance(spec, Gradient) and isinstance(spec.of, Parameter):
            while isinstance(value, fx.Node) and value not in waits and value.all_input_nodes:
                value = value.all_input_nodes[0]
            if value in found:
                found[value] = position.get(spec.of, len(inputs))
    return found


def _in_pages(value: fx.Node, mesh: Mesh) -> bool:
    return isinstance(meta(value).spec, Parameter) and fills_pages_of_memory(value, mesh)


def _cut(members: Iterable[_Member], room: int, kept: frozenset[str], mesh: Mesh) -> list[_Bucket]:
    """Return buckets of members with equal keys, by first use; zero-copy gathers take no room."""
    alike: dict[_Key, list[_Member]] = {}
    for member in members:
        gathers = member.steps[0].target is redistributions.all_gather_shards
        stays = gathers and parameter_of(member.value).name in kept
        in_pages = gathers and _in_pages(member.value, mesh)
        key = member.type.dtype, meta(member.steps[0]).backward, member.axis, stays, in_pages
        alike.setdefault(key, []).append(member)
    buckets = list[_Bucket]()
    for (*_, stays, in_pages), each in alike.items():
        shown = in_pages and not stays and not any(member.stays for member in each)
        buckets += [each] if shown else _by_lifetime(each, room)
    return sorted(buckets, key=lambda bucket: bucket[0].first)


def _by_lifetime(members: list[_Member], room: int) -> list[_Bucket]:
    """Return buckets that can be freed when the next one is due; longer-lived members have separate buckets.

    Example of a long-lived member, the tied weight `w`:

        used at     w: 1, 9     a: 2     b: 3     c: 4
        together    [w a][b c]        a stays till 9, and while c is used b does, too
        apart       [w] [a b][c]      w alone does

    While a long-lived bucket is in memory, so are up to two ordinary ones. These are made smaller, so that
    all three together take no more room than two full buckets.
    """
    long = set[_Member]()
    while True:
        stays = sum(type_bytes(m.type) for m in long)
        beside = room - stays // 2 if stays <= room else room  # else none could be small enough
        buckets = _in_order([m for m in members if m not in long], beside)
        over = [m for bucket, due in pairwise(buckets) for m in bucket if m.last >= due[0].first]
        if not over:
            return buckets + _in_order([m for m in members if m in long], room)
        long.update(over)


def _in_order(members: list[_Member], room: int) -> list[_Bucket]:
    """Return buckets of about `room` bytes, in order; members that one op reads share a bucket."""
    together = [list(group) for _, group in groupby(members, key=lambda member: member.first)]
    runs = few_runs([sum(type_bytes(m.type) for m in group) for group in together], room)
    return [[member for group in together[run] for member in group] for run in runs]


class _Writer:
    """Writer of the nodes of buckets, at the graph's insertion point."""

    def __init__(self, graph: fx.Graph, mesh: Mesh) -> None:
        self._graph = graph
        self._mesh = mesh

    def travel(self, bucket: list[_Member], cause: Cause) -> list[fx.Node]:
        """Insert the redistributions of a bucket and their waits; the last node gives one flat value."""
        ranks = self._mesh.size_along(bucket[0].axis)
        each = tuple(elements_each(self._shape(m), ranks) for m in bucket)
        type_ = TensorType(bucket[0].type.dtype, (ranks * sum(each),))
        first = meta(bucket[0].steps[0])
        steps, value, arguments = list[fx.Node](), [m.value for m in bucket], (each, ())
        for like in bucket[0].steps:
            given = () if steps else arguments
            operand: Any = steps[-1] if steps else value
            known = meta(like)
            made = self._add(like.target, (operand, *given), type_, known, known.operands[:1], first)
            made.kwargs = dict(like.kwargs)
            if like.target is not redistributions.wait:
                meta(made).cause = cause
            steps.append(made)
        return steps

    def cut_out(self, flat: fx.Node, bucket: list[_Member], *, full: bool) -> None:
        """Replace each member's result by a view of the flat value: a full value, or a padded local shard."""
        ranks, start = self._mesh.size_along(bucket[0].axis), 0
        for member in bucket:
            last, shape = member.steps[-1], self._shape(member)
            rows = shape[0] if full else shard_rows(shape[0], ranks)
            # sharded as by `torch.chunk`: the padding of a full value follows its last row
            taken, length = elements_each(shape, ranks) * (ranks if full else 1), rows * prod(shape[1:])
            known, flat_type = meta(last), TensorType(member.type.dtype, (elements(member.type),))
            reads, at = (known.placement,), (flat, 0, start, start + length)
            piece = self._add(aten.slice.Tensor, at, flat_type, known, reads)
            made = self._add(aten.view.default, (piece, [rows, *shape[1:]]), known.type, known, reads)
            last.replace_all_uses_with(made)
            start += taken

    def erase(self, bucket: list[_Member]) -> None:
        """Erase the redistributions that the bucket replaces."""
        for member in bucket:
            for step in reversed(member.steps):
                self._graph.erase_node(step)

    def _shape(self, member: _Member) -> list[int]:
        return [int(n) for n in member.type.shape]

    def _add(
        self, target: Any, args: tuple[Any, ...], type_: Any, known: Metadata, reads: Any,
        like: Metadata | None = None,
    ) -> fx.Node:  # fmt: skip
        """Add a node with the placement of `known`, at the location and in the phase of `like`."""
        like = like or known
        placement: Any = known.placement
        node = placed_call(self._graph, target, args, type_, placement, backward=like.backward, reason=_RULE)
        meta(node).location, meta(node).operands = like.location, reads * len(tensor_operands(node))
        return node


def _to_the_end(graph: fx.Graph, roots: set[fx.Node]) -> fx.Node:
    """Move nodes computed from gradient shards, such as casts, to the end of the graph.

    Return the first one.
    """
    output, reached = graph.output_node(), reachable(roots) - roots
    moved = [node for node in graph.nodes if node in reached and node is not output]
    for node in moved:
        output.prepend(node)
    return moved[0] if moved else output


@dataclass(frozen=True)
class BucketParameters:
    """All-gather parameters, and reduce-scatter their gradients, in buckets.

    before: `%all_gather_shards = all_gather_shards(%w)` and its `wait` for each parameter and phase
    after:  `%all_gather_shards_2 = all_gather_shards([%w, %b], (40, 5), ())` and `wait`, before the first use
            of a member, and views of the flat value; `reduce_scatter_shards` in the same way, after the last
            gradient

    Buckets follow the order of use in the forward, the order of use in the backward, and the order in which
    gradients are computed, independently. Inside a bucket, parameters are in the model's order, as in memory;
    so are gradients. Parameters that are still read when the next bucket is due, such as a tied weight, go
    into separate buckets, so that no further parameters stay in memory; ordinary buckets are smaller then.
    Zero-copy gathers between ranks of one host take no room, so all of a phase form one bucket.

    Parameters
    ----------
    bucket_bytes : bytes of full values in one bucket. None: 25 MiB, 4 MiB where ranks share memory, or a size
        that suits their link. The limit is raised, to less than twice the size, as far as needed to have only
        `ceil(bytes / bucket_bytes)` buckets. Parameters that one op reads are not separated, so a larger one
        has its own bucket.
    kept : names of parameters whose full values stay from the forward to the backward when the rest is
        resharded.
    """

    bucket_bytes: int | None = None
    kept: frozenset[str] = frozenset()

    name = "bucket-parameters"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size_along(mesh.shard_axis) == 1:  # the shard of a single data rank is the full value
            return gm
        graph, writer = gm.graph, _Writer(gm.graph, mesh)
        position = {node: i for i, node in enumerate(graph.nodes)}
        gathers = _gathers(graph, position)
        for bucket in _cut(gathers, self._room(gathers, mesh), self.kept, mesh):
            cause = gathers_cause([m.steps[0] for m in bucket])
            first_use = min((m.steps[-1] for m in bucket), key=position.__getitem__)
            # in the order of memory: adjacent shards are one view, and packing copies nothing
            bucket.sort(key=lambda m: position[m.value])
            with graph.inserting_before(first_use):
                flat = writer.travel(bucket, cause)[-1]
                writer.cut_out(flat, bucket, full=True)
            writer.erase(bucket)
        scatters = _scatters(graph, position)
        end = _to_the_end(graph, {m.steps[-1] for m in scatters})
        place = _places(graph, {m.steps[-1] for m in scatters}, mesh)
        for bucket in _cut(scatters, self._room(scatters, mesh), self.kept, mesh):
            made, cause = bucket[-1].value, gradients_cause(causes_of([m.steps[0] for m in bucket]))
            # in the order of the parameters, so that an optimizer may step all of them as one
            bucket.sort(key=lambda m: place[m.steps[-1]])
            with graph.inserting_before(made.next):
                start, *rest = writer.travel(bucket, cause)
            with graph.inserting_before(end):
                writer.cut_out(rest[-1] if rest else start, bucket, full=False)
            writer.erase(bucket)
        return gm

    def _room(self, members: list[_Member], mesh: Mesh) -> int:
        total = sum(type_bytes(m.type) for m in members)
        return bucket_of(total, self.bucket_bytes, mesh.link, IN_MEMORY if mesh.shared_memory else LARGEST)
