"""Make a gradient full on every rank, where what it is computed from is less to send than its sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from fxdp.ir.factors import SUFFICIENT_FACTORS
from fxdp.ir.graphs import results_of
from fxdp.ir.level import Level
from fxdp.ir.link_cost import LinkCost
from fxdp.ir.mesh import Mesh
from fxdp.ir.metadata import meta, tensor_operands, tensor_type, value_bytes
from fxdp.ir.op_kinds import is_view
from fxdp.ir.placements import P, R, Shard
from fxdp.ir.signature import Gradient, Parameter
from fxdp.pipeline.cut.cost import node_cost

aten = torch.ops.aten

_SUM = aten.sum.dim_IntList
_MAKERS = (aten.mm.default, aten.embedding_dense_backward.default, _SUM)
"""Ops that compute a gradient from values of samples, and cost little beside what its sum takes on a wire."""
_CLEARLY = 0.7
"""Less of the sum's time is worth a gather: speeds are estimates, and later batches may be larger."""
_OF_A_CORE = {torch.float32: 2e10, torch.float64: 1e10}
"""Operations in a second, of a slow one."""
_WITHOUT_PRODUCTS = 1e9
"""The same in other dtypes, for which a CPU may have no products of its own."""
_OF_A_GPU = 1e13


@dataclass(frozen=True)
class _Gradient:
    """A gradient that is computed by one op from values of samples, and seen differently or cast after it."""

    value: fx.Node
    maker: fx.Node
    path: tuple[fx.Node, ...]
    """From the value up to what the maker gives, both included."""
    factors: frozenset[fx.Node]
    """What has to be gathered of each sample."""
    views: frozenset[fx.Node]
    """How the maker sees these."""


@dataclass
class _Choosing:
    mesh: Mesh
    per_byte: float
    batch: int
    sharded: bool
    dtype: torch.dtype | None
    gathered: set[fx.Node] = field(default_factory=set)

    def is_less(self, gradient: _Gradient) -> bool:
        """Whether a gather of what is not gathered anyway, and entire work, take less time than a sum."""
        new = gradient.factors - self.gathered
        if not new and gradient.maker.target is _SUM:
            return True  # a pass over what is there
        # a sum sends each byte twice, away and back; a gather once, as a sum does that is sharded
        gather = sum(value_bytes(n, self.batch) for n in new) * self.per_byte / 2
        return gather + self._work(gradient.maker) < _CLEARLY * self._sum(gradient.value)

    def _sum(self, value: fx.Node) -> float:
        own = tensor_type(value).dtype
        bytes_ = value_bytes(value, self.batch) * (self.dtype or own).itemsize / own.itemsize
        return bytes_ * self.per_byte / (2 if self.sharded else 1)

    def _work(self, maker: fx.Node) -> float:
        """The seconds of the other ranks' samples."""
        of_a_core = _OF_A_CORE.get(tensor_type(maker).dtype, _WITHOUT_PRODUCTS)
        speed = of_a_core if self.mesh.device_type == "cpu" else _OF_A_GPU
        others = (self.mesh.size - 1) / self.mesh.size
        return others * node_cost(maker, self.batch) / speed

    def choose(self, gradient: _Gradient) -> None:
        """Let every rank compute it full."""
        self.gathered |= gradient.factors
        for view in gradient.views:
            meta(view).rematerialized, meta(view).reason = True, SUFFICIENT_FACTORS
        known = meta(gradient.maker)
        known.operands, known.rewrite = (R,) * len(known.operands), None
        for node in gradient.path:
            meta(node).placement, meta(node).reason = R, SUFFICIENT_FACTORS
            if node is not gradient.maker:
                meta(node).operands = (R,)


def _rounded(link: LinkCost) -> float:
    """The seconds of a byte, to a power of two: measured anew at each start, and programs are kept."""
    return 2.0 ** round(math.log2(max(link.per_byte, 1e-18)))


def _gradients(graph: fx.Graph) -> Iterator[_Gradient]:
    output = graph.output_node()
    wanted = zip(results_of(graph), meta(output).operands, strict=True)
    values = {
        value: None for (spec, value), placement in wanted
        if isinstance(spec, Gradient) and isinstance(spec.of, Parameter) and placement == R
    }  # fmt: skip
    for value in values:
        if meta(value).placement == P and (found := _followed(value)) is not None:
            yield found


def _followed(value: fx.Node) -> _Gradient | None:
    path = [value]
    while len(path[-1].users) == 1:
        node = path[-1]
        if node.target in _MAKERS:
            return _made(value, path)
        if not (is_view(node.target) or node.target is aten._to_copy.default):
            return None
        path += tensor_operands(node)
    return None


def _made(value: fx.Node, path: list[fx.Node]) -> _Gradient | None:
    maker = path[-1]
    if meta(maker).decomposition is not None or meta(maker).decomposed_from:
        return None
    factors, views = set[fx.Node](), set[fx.Node]()
    for operand, wanted in zip(tensor_operands(maker), meta(maker).operands, strict=True):
        if not isinstance(wanted, Shard) or meta(operand).placement != wanted:
            if wanted == R and meta(operand).placement == R:
                continue
            return None
        node = operand
        while is_view(node.target) and isinstance(meta(source := node.all_input_nodes[0]).placement, Shard):
            if value_bytes(source) != value_bytes(node):  # a part of it, or an expansion
                break
            views.add(node)
            node = source
        factors.add(node)
    return _Gradient(value, maker, tuple(path), frozenset(factors), frozenset(views))


@dataclass(frozen=True)
class GatherSufficientFactors:
    """Gather the factors of gradients where they are clearly less to send and quickly multiplied.

    before: `%mm: f32[4096, 4096] {dp=P(sum)} = aten.mm(%t, %x)` of `%t {dp=S(1)}` and `%x {dp=S(0)}`
    after:  `%mm: f32[4096, 4096] {dp=R} = aten.mm(%t, %x)`, for which `insert-collectives` gathers both

    A linear layer's gradient is a product of what the samples bring to it and what comes back to them
    (sufficient factors; Xie et al., "Distributed machine learning via sufficient factor broadcasting", 2015):
    of 64 samples and a weight of 4096 x 4096 these are a 32nd of it. Each rank multiplies them for the full
    batch, as one device would. An embedding's gradient has as factors the rows of its samples and their ids.

    Nothing is done without a link whose cost is known, or where ranks would compute different last bits.

    Parameters
    ----------
    batch : the samples of the call that is compiled for, on all ranks together.
    sharded : gradients are sharded.
    dtype : in which they would be summed; None: in their own.
    """

    batch: int
    sharded: bool = False
    dtype: torch.dtype | None = None

    name = "gather-sufficient-factors"
    requires = Level.PLACED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        if mesh.size == 1 or mesh.link is None or not mesh.alike:
            return gm
        choosing = _Choosing(mesh, _rounded(mesh.link), self.batch, self.sharded, self.dtype)
        # products first: with their factors there, a bias costs nothing to send
        for gradient in sorted(_gradients(gm.graph), key=lambda g: g.maker.target is _SUM):
            if choosing.is_less(gradient):
                choosing.choose(gradient)
        return gm
