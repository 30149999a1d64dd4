"""Compute gradients in full on every rank from gathered factors, where these are cheaper to send."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from fxdp.ir.graph.factors import SUFFICIENT_FACTORS
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta, tensor_operands, tensor_type, value_bytes
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.network.link_cost import LinkCost
from fxdp.ir.op_kinds import is_view
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import P, R, Shard
from fxdp.pipeline.cut.cost import node_cost
from fxdp.torch_compat import aten

_SUM = aten.sum.dim_IntList
_MAKERS = (aten.mm.default, aten.embedding_dense_backward.default, _SUM)
"""Ops that compute a gradient from per-sample values, cheaply compared with an all-reduce."""
_CLEARLY = 0.7
"""The fraction of an all-reduce's time below which a gather is chosen.

The margin is there because speeds are estimates, and later batches may be larger.
"""
_OF_A_CORE = {torch.float32: 2e10, torch.float64: 1e10}
"""Operations per second of a slow CPU core, by dtype."""
_WITHOUT_PRODUCTS = 1e9
"""Operations per second of a CPU core in dtypes that may lack matrix products of their own."""
_OF_A_GPU = 1e13


@dataclass(frozen=True)
class _Gradient:
    """A gradient computed by one op from per-sample values, and then only viewed or cast."""

    value: fx.Node
    maker: fx.Node
    path: tuple[fx.Node, ...]
    """The nodes from `value` back to `maker`, both included."""
    factors: frozenset[fx.Node]
    """The per-sample values that have to be gathered."""
    views: frozenset[fx.Node]
    """The views of the factors that `maker` reads."""


@dataclass
class _Choosing:
    mesh: Mesh
    per_byte: float
    batch: int
    sharded: bool
    dtype: torch.dtype | None
    gathered: set[fx.Node] = field(default_factory=set)

    def is_less(self, gradient: _Gradient) -> bool:
        """Return whether gathering the missing factors and multiplying is faster than an all-reduce."""
        new = gradient.factors - self.gathered
        if not new and gradient.maker.target is _SUM:
            return True  # one pass over values that are gathered already
        # an all-reduce sends each byte twice, a gather or a reduce-scatter once
        gather = sum(value_bytes(n, self.batch) for n in new) * self.per_byte / 2
        return gather + self._work(gradient.maker) < _CLEARLY * self._sum(gradient.value)

    def _sum(self, value: fx.Node) -> float:
        own = tensor_type(value).dtype
        bytes_ = value_bytes(value, self.batch) * (self.dtype or own).itemsize / own.itemsize
        return bytes_ * self.per_byte / (2 if self.sharded else 1)

    def _work(self, maker: fx.Node) -> float:
        """Return the seconds that a rank needs for the samples of all remaining ranks."""
        of_a_core = _OF_A_CORE.get(tensor_type(maker).dtype, _WITHOUT_PRODUCTS)
        speed = of_a_core if self.mesh.device_type == "cpu" else _OF_A_GPU
        others = (self.mesh.size - 1) / self.mesh.size
        return others * node_cost(maker, self.batch) / speed

    def choose(self, gradient: _Gradient) -> None:
        """Let every rank compute the full gradient."""
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
    """Return the seconds per byte of a link, rounded to a power of two.

    Links are measured anew at each start, and rounding keeps cached programs valid.
    """
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
    """Gather the factors of gradients where they are clearly cheaper to send and quick to multiply.

    before: `%mm: f32[4096, 4096] {dp=P(sum)} = aten.mm(%t, %x)` of `%t {dp=S(1)}` and `%x {dp=S(0)}`
    after:  `%mm: f32[4096, 4096] {dp=R} = aten.mm(%t, %x)`, for which `insert-collectives` gathers both

    A linear layer's gradient is the product of the inputs and the output gradients for all samples
    (sufficient factors; Xie et al., "Distributed machine learning via sufficient factor broadcasting", 2015).
    For 64 samples and a weight of 4096 x 4096, the factors have 1/32 of the gradient's size. Each rank
    multiplies the factors of the full batch, as one device would. The factors of an embedding's gradient are
    the rows and ids of the samples.

    The pass does nothing if the cost of the link is unknown, or if ranks would compute different last bits.

    Parameters
    ----------
    batch : number of samples, on all ranks together, of the call for which the program is compiled.
    sharded : gradients are sharded.
    dtype : dtype in which gradients would be reduced; None: their own.
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
        # products first: once their factors are gathered, a bias needs no further traffic
        for gradient in sorted(_gradients(gm.graph), key=lambda g: g.maker.target is _SUM):
            if choosing.is_less(gradient):
                choosing.choose(gradient)
        return gm
