"""Gather sufficient factors of gradients in few messages, and compute these gradients at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from math import prod

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.factors import SUFFICIENT_FACTORS
from fxdp.ir.graph.gradient_tails import computed_after, deferrable
from fxdp.ir.graph.graphs import erase_unused
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, members_of, meta, tensor_type, value_bytes
from fxdp.ir.graph.packing import placed_call
from fxdp.ir.graph.parameter_buckets import causes_of
from fxdp.ir.network.link_cost import few_runs
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import R, Shard
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten


@dataclass(frozen=True, slots=True)
class _Factor:
    """A gather that serves gradients only, of a value with equally many elements for each sample."""

    pending: fx.Node
    done: fx.Node
    first: int
    """The batch dim of the value."""
    rest: tuple[int, ...]
    """The shape of one sample: with the batch dim first, the value has shape `[-1, *rest]`."""
    each: int
    """The number of elements of one sample."""

    @property
    def value(self) -> fx.Node:
        """The operand of the gather."""
        return self.pending.args[0]  # type: ignore[return-value]


def _factors(graph: fx.Graph) -> list[_Factor]:
    deferred = deferrable(graph, cut=True)
    found = []
    for node in graph.nodes:
        if node.target is redistributions.wait and node in deferred and _serves_products(node):
            pending = node.args[0]
            if (
                pending.target is redistributions.all_gather
                and (factor := _factor(pending, node)) is not None
            ):
                found.append(factor)
    return found


def _serves_products(done: fx.Node) -> bool:
    return all(meta(user).reason == SUFFICIENT_FACTORS for user in done.users)


def _factor(pending: fx.Node, done: fx.Node) -> _Factor | None:
    """Return the factor of a gather; None if a sample has a dynamic size or is not one contiguous block."""
    _, dim, outer, inner = pending.args
    rest = [int(n) for i, n in enumerate(tensor_type(pending).shape) if i != dim and isinstance(n, int)]
    static = len(rest) == len(tensor_type(pending).shape) - 1
    if outer != 1 or not static or not isinstance(inner, int) or redistributions.axis_of(pending):
        return None
    assert isinstance(dim, int)
    return _Factor(pending, done, dim, tuple(rest), inner * prod(rest))


class _Bucketing:
    """Rewrite of one graph: one gather per bucket of factors."""

    def __init__(self, graph: fx.Graph, batch: int, mesh: Mesh) -> None:
        self.graph = graph
        self._add = partial(placed_call, graph, backward=True, reason=SUFFICIENT_FACTORS)
        self.batch = batch
        self.link = mesh.link
        self.position = {n: i for i, n in enumerate(graph.nodes)}

    def run(self) -> None:
        factors = _factors(self.graph)
        if not factors:
            return
        later = computed_after(self.graph, {factor.done for factor in factors})
        self.begin = self._begin({*later, *(n for f in factors for n in (f.pending, f.done))})
        output = self.graph.output_node()
        for node in later:
            output.prepend(node)
        factors.sort(key=lambda f: str(tensor_type(f.pending).dtype))  # stable: in the backward's order
        for _, alike in groupby(factors, key=lambda f: tensor_type(f.pending).dtype):
            self._bucket(list(alike))
        erase_unused(self.graph)  # views of local samples, which only the local terms of gradients used

    def _begin(self, moved: set[fx.Node]) -> fx.Node:
        """Return the node where the backward begins: factors from the forward are sent no earlier than there.

        A factor from the forward so shares a bucket with the second factor of the same product.
        """
        given = [n for n in self.graph.nodes if n.op == "placeholder"]
        calls = (n for n in self.graph.nodes if n.op == "call_function" and n not in moved)
        begin: fx.Node = next((n for n in calls if meta(n).backward), given[-1])
        return begin

    def _bucket(self, factors: list[_Factor]) -> None:
        sizes = [value_bytes(f.pending, self.batch) for f in factors]
        bucket = sum(sizes) if self.link is None else self.link.bucket(sum(sizes))
        for run in few_runs(sizes, max(1, bucket)):
            self._gather(factors[run])

    def _gather(self, factors: Sequence[_Factor]) -> None:
        """Insert one gather of factors.

        The gather starts when the last factor is computed; the wait comes before the first reader.
        """
        last = max((self.begin, *(f.value for f in factors)), key=self.position.__getitem__)
        first = min((f.done for f in factors), key=self.position.__getitem__)
        reader = min(first.users, key=self.position.__getitem__)
        ends = [0, *accumulate(f.each for f in factors)]
        dtype = tensor_type(factors[0].pending).dtype
        full = TensorType(dtype, (B, ends[-1]))
        with self.graph.inserting_before(last.next):
            rows = [self._rows(factor) for factor in factors]
            packed = self._add(aten.cat.default, (rows, 1), full, Shard(0)) if len(rows) > 1 else rows[0]
            pending = self._add(redistributions.all_gather, (packed, 0, 1, 1), full, R, (Shard(0),))
            meta(pending).cause = _cause(causes_of([f.pending for f in factors]))
        with self.graph.inserting_before(reader):
            done = self._add(redistributions.wait, (pending,), full, R)
            for factor, (begin, end) in zip(factors, pairwise(ends), strict=True):
                factor.done.replace_all_uses_with(self._columns(factor, done, begin, end))
        for factor in factors:
            self.graph.erase_node(factor.done)
            self.graph.erase_node(factor.pending)

    def _rows(self, factor: _Factor) -> fx.Node:
        """Return a rank's local factor as a matrix with one row per sample."""
        value, dim = factor.value, factor.first
        type_ = tensor_type(value)
        if dim:
            order = [dim, *(i for i in range(len(type_.shape)) if i != dim)]
            type_ = TensorType(type_.dtype, tuple(type_.shape[i] for i in order))
            value = self._add(aten.permute.default, (value, order), type_, Shard(0), (Shard(dim),))
        flat = TensorType(type_.dtype, (B, factor.each))
        if type_ == flat:
            return value
        return self._add(aten.reshape.default, (value, [-1, factor.each]), flat, Shard(0))

    def _columns(self, factor: _Factor, done: fx.Node, begin: int, end: int) -> fx.Node:
        """Return one factor in the original shape from columns `begin` to `end` of a gathered bucket."""
        known = tensor_type(factor.pending)
        flat = TensorType(known.dtype, (B, end - begin))
        found = self._add(aten.slice.Tensor, (done, 1, begin, end), flat, R)
        dim, shape = factor.first, known.shape
        order = [dim, *(i for i in range(len(shape)) if i != dim)]
        first = TensorType(known.dtype, tuple(shape[i] for i in order))
        if first != flat:
            found = self._add(aten.reshape.default, (found, [-1, *factor.rest]), first, R)
        if dim:
            back = [order.index(i) for i in range(len(shape))]
            found = self._add(aten.permute.default, (found, back), known, R)
        return found


def _cause(causes: Sequence[Cause]) -> Cause:
    """Join the causes of a bucket's factors to one cause, at the source line of the first."""
    if len(causes) == 1:
        return causes[0]
    names = list(dict.fromkeys(cause.text.removeprefix("factor of gradient of ") for cause in causes))
    several = f"{len(names)} gradients: {names[0]} to {names[-1]}"
    text = f"factors of {several if len(names) > 1 else f'gradient of {names[0]}'}"
    return replace(causes[0], text=text, members=members_of(causes))


@dataclass(frozen=True)
class BucketSufficientFactors:
    """Gather factors of gradients in few buckets, and compute the gradients when all remaining work is done.

    before: `%all_gather = all_gather(%relu, 0, 1, 1)` and its `wait` before the product that reads it, twice
            per weight
    after:  `%all_gather = all_gather(%cat, 0, 1, 1)` of rows with the values of several factors; the products
            read columns of the result, at the end: the products of one bucket overlap the gather of the next

    Parameters
    ----------
    batch : number of samples, on all ranks together, of the call for which the program is compiled.
    """

    batch: int

    name = "bucket-sufficient-factors"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size > 1:
            _Bucketing(gm.graph, self.batch, mesh).run()
        return gm
