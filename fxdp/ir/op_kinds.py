"""What an op is: one table of facts, for all rooms that must know an op by more than its rule.

    view      its operand seen differently, without memory of its own
    same      each element is the operand's own, maybe broadcast, maybe in another dtype
    identity  changes nothing where it changes neither shape nor dtype
    zeros     of an operand of zeros it makes zeros, whatever its other operands are
    picks     reads no more of its first operand than it returns
    mixes     puts values of several operands together; none is larger than what was given
    shape     reads nothing of its first operand but shape, dtype and device
    unwritten its memory holds whatever was there
    linear    the groups of arguments in which a pointwise op is linear, all others held fixed

The facts are said of each op by itself, since none follows from another:
- A permutation of a square matrix is a view, keeps the type and yet is no identity: it moves values. A
  `clone` is none either: it is there for the order in memory that the next kernel reads.
- Views, sums and products are linear, too, but not pointwise: which dims of them may be cut is for their
  families in `rules/` to say, so the table has no groups for them.
- `zeros` is said of what traced backwards hold. An op that lacks it keeps its tangent: slower, never wrong.
- A fact that is missing must always be the safe answer: ask "is it known to", never "is it known not to".
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Flag, auto
from typing import Any, TypeAlias

from fxdp.ir.ops.library import aten, existing
from fxdp.torch_compat import OpOverload, prims

Groups: TypeAlias = tuple[tuple[str, ...], ...]


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
_SELF: Groups = (("self",),)

_ROWS: tuple[tuple[_Fact, Groups, tuple[OpOverload, ...]], ...] = (
    # one operand, seen differently
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
    # one operand, in memory of its own
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
    # several operands, added or put together
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
    # memory that nothing has written
    (_SHAPE | _UNWRITTEN, (), (aten.empty_like.default,)),
    (_UNWRITTEN, (), (
        aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    )),
    # rows of the first operand, named by the second
    (_PICKS | _MIXES, (), (aten.gather.default, aten.index.Tensor, aten.index_select.default)),
    (_PICKS, (), (aten.embedding.default, aten._unsafe_index.Tensor, *existing("select_copy.int"))),
)  # fmt: skip


def _by_op() -> Iterator[tuple[OpOverload, tuple[_Fact, Groups]]]:
    for facts, groups, ops in _ROWS:
        for op in ops:
            yield op, (facts, groups)


_TABLE: dict[Any, tuple[_Fact, Groups]] = dict(_by_op())


def _has(target: Any, fact: _Fact) -> bool:
    return bool(_TABLE.get(target, (_NONE, ()))[0] & fact)


def is_view(target: Any) -> bool:
    """Whether the result is the operand seen differently."""
    return _has(target, _VIEW)


def is_identity(target: Any) -> bool:
    """Whether the op changes nothing where it changes neither shape nor dtype."""
    return _has(target, _IDENTITY)


def keeps_values(target: Any) -> bool:
    """Whether each element is the operand's own, broadcast from the right or cast at most."""
    return _has(target, _SAME)


def keeps_zeros(target: Any) -> bool:
    """Whether an operand of zeros makes a result of zeros; of a quotient only the first does."""
    return _has(target, _ZEROS)


def picks(target: Any) -> bool:
    """Whether the op reads no more of its first operand than it returns."""
    return _has(target, _PICKS)


def mixes(target: Any) -> bool:
    """Whether the op puts values of several operands together that are no larger than those given."""
    return _has(target, _MIXES)


def reads_shape_alone(target: Any) -> bool:
    """Whether only the shape of the first operand is read, which each rank knows of a partial value, too."""
    return _has(target, _SHAPE)


def is_unwritten(target: Any) -> bool:
    """Whether the values of the result are whatever its memory held before."""
    return _has(target, _UNWRITTEN)


def linear_groups(target: Any) -> Groups:
    """For each way in which a pointwise op is linear the arguments in which it is, all others held fixed."""
    return _TABLE.get(target, (_NONE, ()))[1]
