"""Builder for decompositions: one op as several, with reductions across ranks in between.

A rule for an op that works along the sharded dim (softmax, argmax, ...) may offer a decomposition: steps on
local parts, whose partial results later steps read in full. The decomposition is data.
`passes/expand_decompositions.py` inserts it into the graph if it was chosen, and redistributions between
steps become ordinary collectives.

    log_softmax of S(1)      top   = amax(x)             P(max)
                             small = x - top             S(1), reads top full: an all-reduce
                             total = sum(exp(small))     P(sum)
                             out   = small - log(total)  S(1), reads total full: an all-reduce
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxdp.ir.ops.library import aten
from fxdp.ir.ops.local_ops import positions
from fxdp.ir.types.decompositions import Decomposition, DecompositionStep, Term
from fxdp.ir.types.placements import Dim, P, Partial, Placement, R, Shard
from fxdp.ir.types.sizes import axis_of, exact_quotient, is_range, product
from fxdp.ir.types.value_types import TensorType, type_bytes
from fxdp.rules.dims import offered
from fxdp.rules.registry import Alternative, Op, Operand
from fxdp.torch_compat import OpOverload


@dataclass
class DecompositionBuilder:
    """Builder that records a decomposition of `op`, step by step."""

    op: Op
    inputs: dict[int, Placement | None] = field(default_factory=dict)
    steps: list[DecompositionStep] = field(default_factory=list)

    def operand(self, operand: Operand, placement: Placement = R) -> Term:
        """Read an operand of the op in a placement."""
        self.inputs[operand.index] = placement
        return Term(operand.index, operand.type, placement)

    def unread(self, operand: Operand) -> None:
        """Mark an operand whose value does not matter."""
        self.inputs[operand.index] = None

    def positions(self, like: Term, ndim: int, size: Dim, shard: Shard) -> Term:
        """Add the row numbers along a sharded dim of `size`, as a column of a value of `ndim` dims."""
        axis = axis_of(size)
        assert axis is not None
        inner = exact_quotient(size, product(shard.outer, axis.total))
        assert inner is not None
        shape = tuple(size if d == shard.dim else 1 for d in range(ndim))
        # S(dim, outer) of 3 + 2 rows in two blocks: rank 1 has rows 3 4 and 8 9, `between` = 5 apart
        between = axis.total if shard.outer != 1 else 0  # number of samples from one block to the next
        args = (like, ndim, shard.dim, shard.outer, inner, axis.local, between, axis.offset)
        return self.call(positions, *args, type=TensorType(torch.int64, shape), at=shard)

    def full(self, term: Term) -> Term:
        """Add a full copy of a term, for use as a result.

        The copy is a separate op, since a result is identified by its step, which may have a partial
        placement.
        """
        return self.call(aten.alias.default, term, type=term.type, at=R)

    def call(self, target: OpOverload, *args: Any, type: TensorType, at: Placement, **kwargs: Any) -> Term:
        """Add one op, which reads partial terms in full."""
        read = tuple(_full(a) if isinstance(a, Term) else a for a in args)
        self.steps.append(DecompositionStep(target, read, tuple(kwargs.items()), type, at))
        return Term(-len(self.steps), type, at)

    def pointwise(self, target: OpOverload, *args: Any, dtype: torch.dtype | None = None) -> Term:
        """Add an elementwise op on terms that broadcast; sharded if an operand is sharded."""
        terms = [a for a in args if isinstance(a, Term)]
        ndim = max(len(t.type.shape) for t in terms)
        shape: list[Dim] = [1] * ndim
        for term in terms:
            for i, n in enumerate(term.type.shape, ndim - len(term.type.shape)):
                shape[i] = n if n != 1 else shape[i]
        shard = next((_aligned(t.at, len(t.type.shape), ndim) for t in terms if isinstance(t.at, Shard)), R)
        return self.call(target, *args, type=TensorType(dtype or terms[0].type.dtype, tuple(shape)), at=shard)

    def cast(self, term: Term, dtype: torch.dtype) -> Term:
        """Add a cast of the term to another dtype, if needed."""
        if term.type.dtype == dtype:
            return term
        type_ = TensorType(dtype, term.type.shape)
        return self.call(aten._to_copy.default, term, type=type_, at=_full(term).at, dtype=dtype)

    def reduce(self, target: OpOverload, term: Term, dims: Sequence[int], at: Placement) -> Term:
        """Add a reduction over dims, which stay with size 1."""
        shape = tuple(1 if d in dims else n for d, n in enumerate(term.type.shape))
        return self.call(target, term, tuple(dims), True, type=TensorType(term.type.dtype, shape), at=at)

    def reshaped(self, term: Term, shape: tuple[Dim, ...]) -> Term:
        """Add a view of a full term that drops or adds dims of size 1, if needed."""
        if term.type.shape == shape:
            return term
        type_ = TensorType(term.type.dtype, shape)
        return self.call(aten.view.default, term, shape, type=type_, at=R)

    def serves(self, *results: Term | None) -> Alternative:
        """Return the decomposition as an alternative.

        The price is the cost of the reductions between the steps.
        """
        read = {a.index for step in self.steps for a in step.args if isinstance(a, Term)}
        # a partial result is not counted: its reader decides whether to reduce it
        partial = [s.type for i, s in enumerate(self.steps, 1) if isinstance(s.at, Partial) and -i in read]
        # twice, as in the cost model: an all-reduce sends each byte once to add and once to share
        price = 2 * sum(map(type_bytes, partial))
        chosen = tuple(self.inputs.get(o.index, R) for o in self.op.operands)
        outputs = tuple(None if r is None else r.at for r in results)
        return Alternative(chosen, outputs, None, Decomposition(tuple(self.steps), results, price))


def in_parts(
    op: Op, dims: Collection[int], decomposed: Callable[[Op, list[int], Shard], Alternative]
) -> Iterator[Alternative]:
    """Yield a decomposition for each shard of floating-point operands along one of these dims.

    A rank has to know the numbers of its rows, which must be one range.
    """
    if op.operands[0].type.dtype.is_floating_point:
        for shard in offered(op.operands):
            if shard.dim in dims and is_range(op.operands[0].shape[shard.dim]):
                yield decomposed(op, sorted(dims), shard)


def _full(term: Term) -> Term:
    return replace(term, at=R) if isinstance(term.at, Partial) else term


def _aligned(shard: Placement, ndim: int, wanted: int) -> Placement:
    assert isinstance(shard, Shard)
    return Shard(shard.dim + wanted - ndim, shard.outer)


MAX, MIN, SUM = Partial("max"), Partial("min"), P
