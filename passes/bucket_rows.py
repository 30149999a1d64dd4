"""Gather sharded parameters, and reduce their gradients, in few large steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.ir import conversions
from fxdp.ir.graphs import reachable
from fxdp.ir.level import Level
from fxdp.ir.link_cost import bucket_of
from fxdp.ir.mesh import Mesh
from fxdp.ir.notes import Cause, Note, Reason, members_of, note, tensor_operands, tensor_type
from fxdp.ir.ops.parameter_rows import elements_each, rows_each
from fxdp.ir.packing import elements
from fxdp.ir.placements import Placement
from fxdp.ir.row_buckets import parameter_of
from fxdp.ir.types import TensorType, type_bytes

aten = torch.ops.aten

_RULE = "rows"


@dataclass(frozen=True, slots=True)
class _Member:
    """One parameter's gather, or one gradient's sum: its conversions, the first of which reads `value`."""

    value: fx.Node
    steps: tuple[fx.Node, ...]
    """Each conversion and its wait, in order; the last one's users read the result."""

    @property
    def type(self) -> TensorType:
        return tensor_type(self.value)

    @property
    def axis(self) -> str | None:
        found = conversions.conversion_of(self.steps[0])
        return None if found is None else found.axis


_Key: TypeAlias = "tuple[torch.dtype, bool, str | None, bool]"
"""What travels together has one dtype, phase, axis and lifetime: a flat value lives as long as any of it."""


def _members(graph: fx.Graph, target: Callable[..., Any]) -> list[_Member]:
    found = []
    for node in graph.find_nodes(op="call_function", target=target):
        steps = [node, _only_user(node)]
        following = list(steps[-1].users)
        # on two axes the rows are summed along the other one next, which has as good a use for buckets
        if len(following) == 1 and following[0].target is conversions.sum_rows:
            steps += [following[0], _only_user(following[0])]
        found.append(_Member(node.args[0], tuple(steps)))
    return found


def _only_user(node: fx.Node) -> fx.Node:
    (user,) = node.users
    return user


def _cut(members: Iterable[_Member], limit: int, kept: frozenset[str]) -> list[list[_Member]]:
    """Buckets of at most `limit` bytes, in order, of what may travel together; a larger value has its own."""
    done: list[list[_Member]] = []
    open_: dict[_Key, tuple[list[_Member], int]] = {}
    for member in members:
        stays = member.steps[0].target is conversions.gather_rows and parameter_of(member.value).name in kept
        key = member.type.dtype, note(member.steps[0]).backward, member.axis, stays
        bucket, filled = open_.get(key, ([], 0))
        size = type_bytes(member.type)
        if bucket and filled + size > limit:
            bucket, filled = [], 0
        if not bucket:
            done.append(bucket)
        bucket.append(member)
        open_[key] = bucket, filled + size
    return done


class _Writer:
    """Writes the nodes of buckets at the graph's insertion point."""

    def __init__(self, graph: fx.Graph, mesh: Mesh) -> None:
        self._graph = graph
        self._mesh = mesh

    def travel(self, bucket: list[_Member], cause: Cause) -> list[fx.Node]:
        """The conversions of a bucket with their waits; the last gives one flat value."""
        ranks = self._mesh.size_along(bucket[0].axis)
        each = tuple(elements_each(self._shape(m), ranks) for m in bucket)
        type_ = TensorType(bucket[0].type.dtype, (ranks * sum(each),))
        first = note(bucket[0].steps[0])
        steps, value, arguments = list[fx.Node](), [m.value for m in bucket], (each, ())
        for like in bucket[0].steps:
            given = () if steps else arguments
            operand: Any = steps[-1] if steps else value
            known = note(like)
            reads = known.operands[:1]
            made = self._add(like.target, (operand, *given), type_, known.placement, first, reads)
            made.kwargs = dict(like.kwargs)
            if like.target is not conversions.wait:
                note(made).cause = cause
            steps.append(made)
        return steps

    def cut_out(self, flat: fx.Node, bucket: list[_Member], *, whole: bool) -> None:
        """Views of a flat value in the place of what each member gave: whole values, or padded rows."""
        ranks, start = self._mesh.size_along(bucket[0].axis), 0
        for member in bucket:
            last, shape = member.steps[-1], self._shape(member)
            rows = shape[0] if whole else rows_each(shape[0], ranks)
            # dealt out as by `torch.chunk`: the padding of a whole value lies behind its last row
            taken, length = elements_each(shape, ranks) * (ranks if whole else 1), rows
            for n in shape[1:]:
                length *= n
            known = note(last)
            sides: tuple[Any, ...] = (known.placement,)
            flat_type = TensorType(member.type.dtype, (elements(member.type),))
            piece = self._add(
                aten.slice.Tensor, (flat, 0, start, start + length), flat_type, known.placement, known, sides
            )
            made = self._add(
                aten.view.default, (piece, [rows, *shape[1:]]), known.type, known.placement, known, sides
            )
            last.replace_all_uses_with(made)
            start += taken

    def erase(self, bucket: list[_Member]) -> None:
        """Drop the conversions that the bucket replaces."""
        for member in bucket:
            for step in reversed(member.steps):
                self._graph.erase_node(step)

    def _shape(self, member: _Member) -> list[int]:
        return [int(n) for n in member.type.shape]

    def _add(
        self, target: Any, args: tuple[Any, ...], type_: Any, placement: Any, like: Note,
        operands: tuple[Placement | None, ...],
    ) -> fx.Node:  # fmt: skip
        made = self._graph.call_function(target, args)
        known = note(made)
        known.type, known.placement, known.site, known.backward = type_, placement, like.site, like.backward
        known.operands = operands * len(tensor_operands(made))
        known.reason = Reason(_RULE, known.operands)
        return made


def _gather_cause(bucket: list[_Member]) -> Cause:
    """The parameters, and the op that first needs one of them."""
    names = [parameter_of(m.value).name for m in bucket]
    first = note(bucket[0].steps[0]).cause
    assert first is not None
    listed = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    causes = [cause for m in bucket if (cause := note(m.steps[0]).cause) is not None]
    return replace(first, text=f"{listed} for {first.text}", members=members_of(causes))


def _scatter_cause(bucket: list[_Member]) -> Cause:
    causes = [cause for m in bucket if (cause := note(m.steps[0]).cause) is not None]
    first, last = causes[0], causes[-1]
    if len(causes) == 1:
        return first
    text = f"{len(causes)} gradients: {first.text} to {last.text.removeprefix('gradient of ')}"
    return replace(first, text=text, members=members_of(causes))


def _to_the_end(graph: fx.Graph, roots: set[fx.Node]) -> fx.Node:
    """Move what is computed of rows of gradients, their casts, to the end; gives the first of it."""
    output, reached = graph.output_node(), reachable(roots) - roots
    moved = [node for node in graph.nodes if node in reached and node is not output]
    for node in moved:
        output.prepend(node)
    return moved[0] if moved else output


@dataclass(frozen=True)
class BucketRows:
    """After it parameters are gathered, and their gradients reduced and dealt out, in buckets.

    before: `%gather_rows = gather_rows(%w)` and its `wait` for each parameter and phase
    after:  `%gather_rows_2 = gather_rows([%w, %b], (40, 5), ())` and `wait`, right before the first use of
            one of them, and views of its flat value; `scatter_rows` in the same way, after the last gradient

    Buckets follow the order of use in the forward, that in the backward, and the order in which gradients are
    made, each for itself. Inside of a bucket parameters stand in the model's order: as they lie in memory.

    Parameters
    ----------
    bucket_bytes : the most bytes of whole values in one bucket; None: 25 MiB, or less where the ranks' link
        asks for it.
    kept : the names of parameters whose whole values stay from the forward to the backward, where others go.
    """

    bucket_bytes: int | None = None
    kept: frozenset[str] = frozenset()

    name = "bucket-rows"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size_along(mesh.shard_axis) == 1:  # a data rank's rows are the whole
            return gm
        graph, writer = gm.graph, _Writer(gm.graph, mesh)
        position = {node: i for i, node in enumerate(graph.nodes)}
        gathers = sorted(_members(graph, conversions.gather_rows), key=lambda m: position[m.steps[-1]])
        for bucket in _cut(gathers, self._room(gathers, mesh), self.kept):
            cause, first_use = _gather_cause(bucket), bucket[0].steps[-1]
            # as they lie in memory: side by side they are a view, and packing them copies nothing
            bucket.sort(key=lambda m: position[m.value])
            with graph.inserting_before(first_use):
                flat = writer.travel(bucket, cause)[-1]
                writer.cut_out(flat, bucket, whole=True)
            writer.erase(bucket)
        scatters = sorted(_members(graph, conversions.scatter_rows), key=lambda m: position[m.value])
        end = _to_the_end(graph, {m.steps[-1] for m in scatters})
        for bucket in _cut(scatters, self._room(scatters, mesh), self.kept):
            with graph.inserting_before(bucket[-1].value.next):
                start, *rest = writer.travel(bucket, _scatter_cause(bucket))
            with graph.inserting_before(end):
                writer.cut_out(rest[-1] if rest else start, bucket, whole=False)
            writer.erase(bucket)
        return gm

    def _room(self, members: list[_Member], mesh: Mesh) -> int:
        total = sum(type_bytes(m.type) for m in members)
        return bucket_of(total, self.bucket_bytes, mesh.link)
