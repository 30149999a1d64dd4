"""Localization of an op's arguments: from the captured global sizes to this rank's sizes.

Rules: the size list of a size-producing op is replaced by the local shape of the output's
placement; arguments that a rule names in its `Rewrite` count the rank's own batch; every remaining number
(divisors, arange ends, `n / (n - 1)`) stays global. All functions are pure: sizes stay expressions in `B`,
`b` and `offset`; the pass turns these into graph nodes and the tests evaluate them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils import _pytree as pytree

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import Axis, axis, axis_of
from fxdp.ir.types.value_types import local_shape
from fxdp.rules.registry import Alternative, Op, Operand, overloads
from fxdp.torch_compat import OpOverload

_SIZE_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "size": (
        aten.view.default, aten._unsafe_view.default, aten.expand.default,
        *existing("view_copy", "expand_copy", "_reshape_copy"),
        aten.full, aten.zeros, aten.ones, aten.empty, aten.empty_strided, aten.empty_permuted,
        aten.rand, aten.randn, aten.randint,
        aten.new_full, aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_empty_strided,
        aten.as_strided, aten.normal.float_float,
    ),
    "shape": (aten.reshape.default,),
    "input_sizes": (
        aten.slice_backward, aten.select_backward, aten.diagonal_backward, aten.unfold_backward,
    ),
    "sizes": (aten.value_selecting_reduction_backward,),
    "self_sizes": (aten.index_select_backward,),
    "input_size": (
        aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_nearest3d_backward,
        aten._upsample_nearest_exact1d_backward, aten._upsample_nearest_exact2d_backward,
        aten._upsample_nearest_exact3d_backward, aten.upsample_linear1d_backward,
        aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward,
        aten.upsample_trilinear3d_backward, aten._upsample_bilinear2d_aa_backward,
        aten._upsample_bicubic2d_aa_backward,
        *existing("_upsample_lanczos2d_aa_backward"),
    ),
}  # fmt: skip


SIZE_ARGUMENT: dict[OpOverload, str] = {
    overload: name
    for name, targets in _SIZE_ARGUMENTS.items()
    for overload in overloads(targets)
    if any(argument.name == name for argument in overload._schema.arguments)
}
"""For each size-producing op, the argument that equals the output's shape."""


@dataclass(frozen=True, slots=True)
class MinusOffset:
    """Index operand with global row numbers, which must count from the rank's first row, `offset`."""

    operand: Operand
    offset: Dim


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """Operand that is full along a dim of an axis, of which the rank reads the range of its own rows."""

    operand: Operand
    dim: int
    axis: Axis


def localized(op: Op, alternative: Alternative) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the op's `(args, kwargs)` for this rank's call.

    Operands stay `Operand`s (or become `MinusOffset` or `OwnColumns`), sizes ints or expressions in `B`, `b`.
    """
    rewrite = alternative.rewrite or Rewrite()
    replaced = _new_arguments(op, alternative, rewrite)
    args, kwargs = _arguments(op, rewrite, replaced)
    if not rewrite.minus_offset and not rewrite.own_columns:
        return args, kwargs
    along, columns = axis(rewrite.axis), dict(rewrite.own_columns)

    def changed(operand: Operand) -> Operand | MinusOffset | OwnColumns:
        if operand.index in columns:
            return OwnColumns(operand, columns[operand.index], along)
        return MinusOffset(operand, rewrite.offset) if operand.index in rewrite.minus_offset else operand

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Operand, changed, (args, kwargs))
    return found


def _arguments(op: Op, rewrite: Rewrite, replaced: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if rewrite.target is not None:
        return _for_target(op, rewrite.target, replaced), {}
    names = [argument.name for argument in op.target._schema.arguments]
    args = tuple(replaced.get(names[i], value) for i, value in enumerate(op.args))
    kwargs = {name: replaced.get(name, value) for name, value in op.kwargs}
    # arguments that the call left at their defaults
    kwargs |= {n: v for n, v in rewrite.arguments if n not in names[: len(args)]}
    return args, kwargs


def local_target(op: Op, alternative: Alternative) -> OpOverload:
    """Return the op that a rank runs: the op itself, or the target of the rewrite."""
    return (alternative.rewrite or Rewrite()).target or op.target


def _for_target(op: Op, target: OpOverload, replaced: dict[str, Any]) -> tuple[Any, ...]:
    names = [argument.name for argument in target._schema.arguments]
    return tuple(replaced[name] if name in replaced else op.arg(name) for name in names)


def _new_arguments(op: Op, alternative: Alternative, rewrite: Rewrite) -> dict[str, Any]:
    replaced: dict[str, Any] = {}
    size_argument = SIZE_ARGUMENT.get(op.target)
    if size_argument is not None:
        placement = next(p for p, t in zip(alternative.outputs, op.outputs, strict=True) if t is not None)
        replaced[size_argument] = local_shape(op.output, placement)
    for name in rewrite.local:
        replaced[name] = pytree.tree_map_only(sympy.Expr, _on_rank, op.arg(name))
    return replaced | dict(rewrite.arguments)


def _on_rank(size: sympy.Expr) -> sympy.Expr:
    found = axis_of(size)
    return size if found is None else size.xreplace({found.total: found.local})
