"""Every op of the pointwise family, with operands made from its schema."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fxdp.ir.op_kinds import linear_groups
from fxdp.rules.registry import registry
from tests.rules.harness import T, check, listed, shown
from tests.rules.samples import STAND_INS

aten = torch.ops.aten
SPLITS = ((2, 1, 0), (1, 3))

POINTWISE = [
    t
    for t in registry.targets()
    if registry[t].name == "pointwise" and t._schema.name.removeprefix("aten::") not in STAND_INS
]

INTEGERS = ("bitwise", "shift", "__xor__", "gcd", "lcm")
COMPLEX = ("_conj", "_conj_copy", "conj", "real", "imag", "resolve_conj", "angle", "sgn")

# not called with arguments from the schema, because they must fit together
BY_HAND = {
    aten.lift.default, aten.lift_fresh.default, aten._lazy_clone.default, aten.fill.Tensor, aten.copy.default,
    aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.native_dropout_backward.default,
    aten.rrelu_with_noise_backward.default, aten.polygamma.default, aten.ldexp.Tensor, aten.isreal.default,
    aten.special_zeta.default, aten.complex.default, aten.div.Tensor_mode, aten.div.Scalar_mode,
    aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor, aten.masked_fill.Tensor,
    aten.round.decimals, aten.isin.Tensor_Scalar,
}  # fmt: skip


def arguments(target: OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema: the first tensor `[B, 2, 3]`, the second `[B, 1, 3]`, others `[3]`."""
    name = target._schema.name
    dtype = torch.float64
    if any(word in name for word in INTEGERS):
        dtype = torch.int64
    elif name.removeprefix("aten::") in COMPLEX:
        dtype = torch.complex128
    shapes = iter([("B", 2, 3), ("B", 1, 3), (3,), (3,)])
    args: list[Any] = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            break
        if kind == "Tensor":
            shape = next(shapes)
            mask = argument.name in ("condition", "mask")
            low, high = (1, 5) if dtype == torch.int64 else (0.1, 0.9)
            args.append(T(*shape, dtype=torch.bool if mask else dtype, low=low, high=high))
        elif kind == "Optional[Tensor]":
            args.append(None)
        else:
            args.append({"int": 2, "bool": False}.get(kind, 2 if dtype == torch.int64 else 0.5))
    return args, {}


@pytest.mark.parametrize("target", [t for t in POINTWISE if t not in BY_HAND], ids=shown)
def test_every_op(target: OpOverload) -> None:
    args, kwargs = arguments(target)
    found = check(target, *args, **kwargs, splits=SPLITS)
    assert any(a.startswith("S(0)") or ", S(0)" in a for a in found)
    assert any("P" in a for a in found) == is_linear(target, args), found


def is_linear(target: OpOverload, args: list[Any]) -> bool:
    groups = linear_groups(target)
    names = [a.name for a in target._schema.arguments]
    tensors = {name for name, value in zip(names, args, strict=False) if isinstance(value, T)}
    backward = target._schema.name.endswith("_backward")
    return backward or any(tensors.issuperset(group) for group in groups)


UNARY_LINEAR = "S(0) -> S(0); P -> P"
S2 = "S(0), S(0) -> S(0)"
F32, I64, BOOL = torch.float32, torch.int64, torch.bool

BY_HAND_CASES: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any], str]] = [
    (aten.copy.default, (T("B", 3), T(3)), {}, "S(0), R -> S(0); R, P -> P; P, P -> P"),
    (aten.copy.default, (T("B", 3, dtype=I64), T("B", 3)), {}, S2),
    (aten.fill.Tensor, (T("B", 3), T()), {}, "S(0), R -> S(0); R, P -> P"),
    (aten.lift.default, (T("B"),), {}, UNARY_LINEAR),
    (aten.lift_fresh.default, (T("B"),), {}, UNARY_LINEAR),
    (aten._lazy_clone.default, (T("B"),), {}, UNARY_LINEAR),
    (aten.isin.Tensor_Scalar, (T("B", dtype=I64), 3), {}, "S(0) -> S(0)"),
    (aten.isreal.default, (T("B"),), {}, "S(0) -> S(0)"),
    (aten.clamp.default, (T("B"), 0.2), {}, "S(0) -> S(0)"),
    (aten.clip.default, (T("B"), None, 0.2), {}, "S(0) -> S(0)"),
    (aten.clamp.Tensor, (T("B", 3), T(3), T("B", 1)), {}, "S(0), R, S(0) -> S(0)"),
    (aten.clip.Tensor, (T("B", 3), None, T("B", 1)), {}, S2),
    (aten.round.decimals, (T("B"),), {"decimals": 1}, "S(0) -> S(0)"),
    (aten.masked_fill.Tensor, (T("B"), T("B", dtype=BOOL), T()), {}, "S(0), S(0), R -> S(0); P, R, P -> P"),
    (
        aten._prelu_kernel_backward.default,
        (T("B", 3), T("B", 3), T(3)),
        {},
        "S(0), S(0), R -> S(0), S(0); P, R, R -> P, P",
    ),
    (aten._prelu_kernel.default, (T("B", 3), T(3)), {}, "S(0), R -> S(0)"),
    (aten.native_dropout_backward.default, (T("B"), T("B", dtype=BOOL), 2.0), {}, S2 + "; P, R -> P"),
    (
        aten.rrelu_with_noise_backward.default,
        (T("B"), T("B"), T("B"), 0.1, 0.3, True, False),
        {},
        "S(0), S(0), S(0) -> S(0); P, R, R -> P",
    ),
    (aten.polygamma.default, (1, T("B", low=1)), {}, "S(0) -> S(0)"),
    (aten.ldexp.Tensor, (T("B"), T("B")), {}, S2),
    (aten.special_zeta.default, (T("B", low=2, high=3), T("B", low=1)), {}, S2),
    (aten.complex.default, (T("B"), T("B")), {}, S2 + "; P, P -> P"),
    (aten.div.Tensor_mode, (T("B"), T("B")), {"rounding_mode": "floor"}, S2),
    (aten.div.Scalar_mode, (T("B"), 0.3), {"rounding_mode": "trunc"}, "S(0) -> S(0)"),
    (aten.masked_fill.Scalar, (T("B"), T("B", dtype=BOOL), 0), {}, S2 + "; P, R -> P"),
    (aten.masked_fill.Scalar, (T("B"), T("B", dtype=BOOL), 1.0), {}, S2),
    (aten._to_copy.default, (T("B", dtype=F32),), {"dtype": torch.float64}, "S(0) -> S(0); P -> P"),
    (aten._to_copy.default, (T("B"),), {"dtype": F32}, "S(0) -> S(0)"),  # rounds each term
    (aten._to_copy.default, (T("B"),), {"dtype": I64}, "S(0) -> S(0)"),
    (aten._to_copy.default, (T("B", dtype=I64),), {"dtype": BOOL}, "S(0) -> S(0)"),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "expected"), BY_HAND_CASES, ids=shown)
def test_by_hand(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str) -> None:
    splits = ((1, 0), (3,)) if any(isinstance(t, T) and t.dtype == F32 for t in args) else SPLITS
    assert check(target, *args, **kwargs, splits=splits) == listed(expected)


def test_by_hand_leaves_none_out() -> None:
    assert {target for target, *_ in BY_HAND_CASES} >= BY_HAND


def test_add_of_a_number_is_not_linear() -> None:
    assert check(aten.add.Tensor, T("B", 3), 1.0) == listed("S(0) -> S(0)")


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar], ids=str)
def test_add_of_zero_is_linear(target: OpOverload) -> None:
    """`sum(losses)` begins with it; not if it makes a number of another dtype, which may be rounded."""
    assert check(target, T("B", 3), 0) == listed("S(0) -> S(0); P -> P")
    assert check(target, T("B", 3, dtype=I64), 0.0) == listed("S(0) -> S(0)")


def test_add_of_a_number_tensor_is_linear() -> None:
    assert check(aten.add.Tensor, T("B", 3), T(), alpha=2) == listed("S(0), R -> S(0); P, P -> P")


def test_operands_are_aligned_from_the_right() -> None:
    expected = "S(1), S(0) -> S(1); S(1, 2), S(0, 2) -> S(1, 2); P, R -> P; R, P -> P; S(0), R -> S(0)"
    assert check(aten.mul.Tensor, T("B", "2*B"), T("2*B")) == listed(expected)


def test_a_broadcast_dim_stays_whole() -> None:
    assert "R, S(0) -> S(0)" in check(aten.maximum.default, T(1, 3), T("B", 3))
    assert "R, S(0) -> S(1)" in check(aten.maximum.default, T(2, 1, 3), T("B", 3))


def test_log_sigmoid_and_its_buffer() -> None:
    assert check(aten.log_sigmoid_forward.default, T("B", 3)) == listed("S(0) -> S(0), S(0)")


def test_a_partial_value_may_be_reduced_into_shards() -> None:
    assert check(aten.exp.default, T("B", "B")) == listed("S(0) -> S(0); S(1) -> S(1)")
