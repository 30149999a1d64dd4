"""Rules for pointwise ops: every element of the result depends on the aligned elements of the operands only.

Law: with operands broadcast from the right, sharding one dim of the result shards that dim of each operand
that has it, and leaves operands full that lack or broadcast (size 1) the dim. A sum of terms stays partial
only where the op is linear: `add(P, P)`, `mul(P, R)`, `neg(P)`, `where(R, P, P)`, a gradient through a
pointwise op. Never `add(P, 1.0)`, which would add the number once per rank; `add(P, 0)`, with which a sum of
losses begins, adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxdp.ir.op_kinds import linear_groups
from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.placements import Dim, Shard
from fxdp.rules.dims import candidates, operand_or_none, widens
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, Operand, rule
from fxdp.torch_compat import GoneOp, OpOverload, all_op_names, there

_OTHERWISE = frozenset(  # tagged pointwise, but `equal` returns one bool, and the rest have their own rules
    {aten.equal.default, aten.masked_fill.Scalar, aten.fill.Scalar, aten.zero.default}
)

_UNTAGGED: tuple[OpOverload, ...] = (
    aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default,
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default, aten._lazy_clone.default,
    aten.copy.default, aten.fill.Tensor,
    aten._conj.default, aten._conj_physical.default, aten._neg_view.default, aten.resolve_conj.default,
    aten.resolve_neg.default, aten.complex.default, aten.polar.default, aten.real.default, aten.imag.default,
    aten.masked_fill.Tensor, aten.floor_divide.default, aten.floor_divide.Scalar, aten.rsub.Tensor,
    aten.hardswish.default, aten.leaky_relu.default, aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default, aten.hardshrink_backward.default, aten.softshrink_backward.default,
    aten.softplus_backward.default, aten.elu_backward.default, aten.leaky_relu_backward.default,
    aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default, aten.native_dropout_backward.default,
    aten.rrelu_with_noise_backward.default, aten._prelu_kernel.default, aten._prelu_kernel_backward.default,
    aten._standard_gamma_grad.default, aten.isreal.default, aten.silu_backward.default,
    aten.mish_backward.default, aten.isin.Tensor_Scalar,
    *existing(
        "alias_copy", "detach_copy", "_conj_copy", "_neg_view_copy", "_masked_scale", "_dirichlet_grad",
        "_add_relu.Tensor", "_add_relu.Scalar",
    ),
)  # fmt: skip

_ADDITIONS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar})

_CASTS = frozenset({aten._to_copy.default, aten.copy.default, aten.fill.Tensor})


def _tagged() -> Iterator[OpOverload]:
    """Yield the functional aten overloads that torch tags as pointwise, without random ops."""
    for qualified in all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        if namespace != "aten" or "out" in overload or (base.endswith("_") and not base.endswith("__")):
            continue
        op = getattr(getattr(aten, base), overload or "default")
        if not isinstance(op, GoneOp) and torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
            yield op


def _pointwise_ops() -> tuple[OpOverload, ...]:
    ops = dict.fromkeys((*_tagged(), *there(_UNTAGGED)))
    seeded = torch.Tag.nondeterministic_seeded
    return tuple(op for op in ops if op not in _OTHERWISE and seeded not in op.tags)


@rule("pointwise", *_pointwise_ops())
def _pointwise(op: Op) -> Iterator[Alternative]:
    """Yield aligned shards, and partial values where the op is linear."""
    yield from aligned(op)
    yield from linear(op, *_linear_groups(op))


@rule("pointwise", aten.masked_fill.Scalar)
def _masked_fill(op: Op) -> Iterator[Alternative]:
    """Yield aligned shards, and partial values if the mask fills with 0, which is linear."""
    yield from aligned(op)
    if op.arg("value") == 0:
        yield from linear(op, [op.operands[0]])


def aligned(op: Op) -> Iterator[Alternative]:
    """Yield the existing shards of operands, aligned with the result and all remaining operands."""
    shape = op.output.shape
    if any(t is not None and t.shape != shape for t in op.outputs):
        return
    offers = {(s.dim + len(shape) - o.ndim, s.outer): None for o in op.operands for s in candidates(o)}
    for dim, outer in offers:
        inputs = _aligned_inputs(op.operands, shape, dim, outer)
        if inputs is not None:
            yield op.alternative(inputs, Shard(dim, outer))


def _aligned_inputs(
    operands: tuple[Operand, ...], shape: tuple[Dim, ...], dim: int, outer: Dim
) -> dict[int, Shard] | None:
    inputs: dict[int, Shard] = {}
    for operand in operands:
        own = dim - (len(shape) - operand.ndim)
        if own < 0 or operand.shape[own] == 1:
            continue  # broadcast: every rank's part needs this one row
        if operand.shape[own] != shape[dim]:
            return None
        inputs[operand.index] = Shard(own, outer)
    return inputs


def _linear_groups(op: Op) -> list[list[Operand]]:
    if op.target in _CASTS and not _cast_is_linear(op):
        return []
    if _adds_nothing(op):
        return [[op.operands[0]]]
    names = linear_groups(op.target) or _gradient(op)
    # each rank would add a number in place of a tensor (`add(x, 1)`): groups with one are left out
    groups = [[operand_or_none(op.arg(name)) for name in group] for group in names]
    return [[o for o in group if o is not None] for group in groups if None not in group]


def _adds_nothing(op: Op) -> bool:
    same = bool(op.operands) and op.operands[0].type.dtype == op.output.dtype
    return same and op.target in _ADDITIONS and op.arg("other") == 0


def _gradient(op: Op) -> tuple[tuple[str, ...], ...]:
    """Return the incoming gradient of a backward op, in which it is linear, as the only group."""
    first = op.target._schema.arguments[0].name
    is_backward = op.target._schema.name.endswith("_backward")
    return ((first,),) if is_backward and first in ("grad", "grad_out", "grad_output") else ()


def _cast_is_linear(op: Op) -> bool:
    # `copy` and `fill` read their last operand only; if this is a host number, there is no operand
    return bool(op.operands) and widens(op.operands[-1].type.dtype, op.output.dtype)
