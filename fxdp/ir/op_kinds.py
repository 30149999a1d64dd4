"""Facts about ops, in one table, for all code that needs more than an op's sharding rule.

    view      the result is a view of the operand, without memory of its own
    same      each element equals one of the operand's, maybe broadcast, maybe in another dtype
    identity  changes nothing if shape and dtype stay the same
    zeros     maps an operand of zeros to zeros, for any values of the remaining operands
    picks     reads no more elements of the first operand than are returned
    mixes     combines values of several operands; none is larger than the given values
    shape     reads only shape, dtype and device of the first operand
    unwritten returns uninitialized memory
    linear    the groups of arguments in which a pointwise op is linear, with all remaining ones fixed

Each op has each fact on its own, since no fact follows from another:
- A permutation of a square matrix is a view, keeps the type and yet is no identity: it moves values. A
  `clone` is no identity either: the copy has the order in memory that the next kernel reads.
- Views, sums and products are linear, too, but not pointwise: the families in `rules/` decide which of their
  dims may be sharded, so the table has no groups for them.
- `zeros` describes the ops of traced backwards. An op without this fact keeps its tangent, which is slower,
  never wrong.
- A missing fact must always be the safe answer: ask "is it known to", never "is it known not to".
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Flag, auto
from typing import Any, TypeAlias

from fxdp.ir.ops.library import aten, existing
from fxdp.torch_compat import OpOverload, prims

_Groups: TypeAlias = tuple[tuple[str, ...], ...]


class _Fact(Flag):
    NONE = 0
    VIEW = auto()
    SAME = auto()
    IDENTITY = auto()
    ZEROS = auto()
    PICKS = auto()
    MIXES = auto()
    SHAPE = auto()
    UNWRITTEN = auto()


_NONE, _VIEW, _SAME, _IDENTITY = _Fact.NONE, _Fact.VIEW, _Fact.SAME, _Fact.IDENTITY
_ZEROS, _PICKS, _MIXES, _SHAPE = _Fact.ZEROS, _Fact.PICKS, _Fact.MIXES, _Fact.SHAPE
_UNWRITTEN = _Fact.UNWRITTEN
_SELF: _Groups = (("self",),)

_ROWS: tuple[tuple[_Fact, _Groups, tuple[OpOverload, ...]], ...] = (
    # one operand, as a view
    (_VIEW | _ZEROS, (), (
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
        aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.select.int,
    )),
    (_VIEW, (), (aten.squeeze.default,)),
    (_VIEW | _ZEROS | _IDENTITY, (), (aten.slice.Tensor,)),
    (_VIEW | _ZEROS | _IDENTITY | _SAME, (), (aten.expand.default,)),
    (_VIEW | _ZEROS | _IDENTITY | _SAME, _SELF, (aten.detach.default,)),
    (_VIEW | _IDENTITY | _SAME, _SELF, (aten.alias.default,)),
    # one operand, copied
    (_IDENTITY | _SAME, _SELF, (aten.lift_fresh_copy.default,)),
    (_ZEROS | _SAME, _SELF, (aten.clone.default, aten._to_copy.default)),
    (_ZEROS | _IDENTITY, (), (aten.slice_backward.default,)),
    (_ZEROS, (), (
        aten.select_backward.default, aten.constant_pad_nd.default, aten.sum.default, aten.sum.dim_IntList,
        prims.convert_element_type.default,
    )),
    (_ZEROS, _SELF, (aten.neg.default, aten.mul.Scalar, aten.div.Scalar)),
    (_NONE, _SELF, (
        aten.lift_fresh.default, aten.lift.default, aten._lazy_clone.default, aten.positive.default,
        aten.deg2rad.default, aten.rad2deg.default, aten._conj.default, aten._conj_physical.default,
        aten.conj_physical.default, aten._neg_view.default, aten.resolve_conj.default,
        aten.resolve_neg.default, aten.real.default, aten.imag.default,
        *existing("alias_copy", "detach_copy", "_conj_copy", "_neg_view_copy", "_masked_scale"),
    )),
    # several operands, multiplied or divided
    (_ZEROS, (), (aten.mm.default, aten.bmm.default)),
    (_ZEROS, (("self",), ("other",)), (aten.mul.Tensor,)),
    (_ZEROS, _SELF, (aten.div.Tensor,)),  # zeros of its first operand only
    (_NONE, _SELF, (aten.true_divide.Tensor,)),
    (_NONE, (("self", "tensor1"), ("self", "tensor2")), (aten.addcmul.default,)),
    (_NONE, (("self", "tensor1"),), (aten.addcdiv.default,)),
    # several operands, added or combined
    (_MIXES, (("self", "other"),), (aten.add.Tensor, aten.sub.Tensor, aten.where.self)),
    (_NONE, (("self", "other"),), (aten.rsub.Tensor,)),
    (_NONE, (("self", "end"),), (aten.lerp.Scalar, aten.lerp.Tensor)),
    (_NONE, (("real", "imag"),), (aten.complex.default,)),
    (_NONE, (("value",),), (aten.fill.Tensor,)),
    (_MIXES, (("src",), ("self", "src")), (aten.copy.default,)),
    (_MIXES, (("self", "value"),), (aten.masked_fill.Tensor,)),
    (_MIXES, (), (
        aten.cat.default, aten.stack.default, aten.scatter.src, aten.scatter_add.default,
        aten.index_put.default, aten.select_scatter.default, aten.slice_scatter.default,
        aten.diagonal_scatter.default, aten.index_add.default, aten.index_copy.default,
        aten.masked_fill.Scalar,
    )),
    # a value of the operand's shape
    (_SHAPE, (), (
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.fill.Scalar, aten.zero.default, aten.rand_like.default, aten.randn_like.default,
        aten.randint_like.default, aten.randint_like.low_dtype, aten.bernoulli.p, aten.uniform.default,
        aten.normal_functional.default, aten.log_normal.default, aten.cauchy.default,
        aten.exponential.default, aten.geometric.default, aten.random.default, aten.random.to,
        getattr(aten.random, "from"),
    )),
    # uninitialized memory
    (_SHAPE | _UNWRITTEN, (), (aten.empty_like.default,)),
    (_UNWRITTEN, (), (
        aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    )),
    # rows of the first operand, selected by the second
    (_PICKS | _MIXES, (), (aten.gather.default, aten.index.Tensor, aten.index_select.default)),
    (_PICKS, (), (aten.embedding.default, aten._unsafe_index.Tensor, *existing("select_copy.int"))),
)  # fmt: skip


def _by_op() -> Iterator[tuple[OpOverload, tuple[_Fact, _Groups]]]:
    for facts, groups, ops in _ROWS:
        for op in ops:
            yield op, (facts, groups)


_TABLE: dict[Any, tuple[_Fact, _Groups]] = dict(_by_op())


def _has(target: Any, fact: _Fact) -> bool:
    return bool(_TABLE.get(target, (_NONE, ()))[0] & fact)


def is_view(target: Any) -> bool:
    """Return whether the result is a view of the operand."""
    return _has(target, _VIEW)


def is_identity(target: Any) -> bool:
    """Return whether the op changes nothing if shape and dtype stay the same."""
    return _has(target, _IDENTITY)


def keeps_values(target: Any) -> bool:
    """Return whether each element equals one of the operand's, at most broadcast or cast."""
    return _has(target, _SAME)


def keeps_zeros(target: Any) -> bool:
    """Return whether an operand of zeros gives a result of zeros.

    For a quotient, only zeros of the first operand do.
    """
    return _has(target, _ZEROS)


def picks(target: Any) -> bool:
    """Return whether the op reads no more elements of the first operand than it returns."""
    return _has(target, _PICKS)


def mixes(target: Any) -> bool:
    """Return whether the op combines values of several operands, none of which grows in the result."""
    return _has(target, _MIXES)


def reads_shape_alone(target: Any) -> bool:
    """Return whether only the shape of the first operand is read, which is known even if partial."""
    return _has(target, _SHAPE)


def is_unwritten(target: Any) -> bool:
    """Return whether the result is uninitialized memory."""
    return _has(target, _UNWRITTEN)


def linear_groups(target: Any) -> _Groups:
    """Return the groups of arguments in which a pointwise op is linear, with the remaining ones fixed."""
    return _TABLE.get(target, (_NONE, ()))[1]
