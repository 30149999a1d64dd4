"""Sums, means, extrema, norms, statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from fxdp.rules.registry import registry
from tests.rules.harness import T, check, listed

aten = torch.ops.aten
I64, BOOL = torch.int64, torch.bool

SUMS: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.sum.default, (T("B", 3),), "P -> P; S(0) -> P"),
    (aten.sum.default, (T("2*B"),), "P -> P; S(0) -> P; S(0, 2) -> P"),
    (aten.sum.default, (T("B", dtype=BOOL),), "S(0) -> P"),
    (aten.sum.default, (T("B", dtype=I64),), "P -> P; S(0) -> P"),
    (aten.sum.dim_IntList, (T("B", 3), [1], True), "P -> P; S(0) -> S(0)"),
    (aten.sum.dim_IntList, (T(2, "B", 3), [0, -1]), "P -> P; S(1) -> S(0)"),
    (aten.sum.dim_IntList, (T(2, "B", 3), [0, -1], True), "P -> P; S(1) -> S(1)"),
    (aten.sum.dim_IntList, (T(2, "B", 3), [0, 1]), "P -> P; S(1) -> P"),
    (aten.sum.dim_IntList, (T("B", 3), [0], True), "P -> P; S(0) -> P"),
    (aten.sum.dim_IntList, (T("B", 3), []), "P -> P; S(0) -> P"),
    (aten.sum.dim_IntList, (T("B", 3), None), "P -> P; S(0) -> P"),
    (aten.nansum.default, (T("B", 3), [0]), "S(0) -> P"),
    (aten.count_nonzero.default, (T("B", 3, dtype=I64, high=2),), "S(0) -> P"),
    (aten.count_nonzero.dim_IntList, (T("B", 3, dtype=BOOL), [1]), "S(0) -> S(0)"),
    (aten.linalg__powsum.default, (T("B", 3), 3, [0]), "S(0) -> P"),
    (aten.mean.default, (T("B", 3),), "P -> P"),
    (aten.mean.dim, (T("B", 3), [1]), "P -> P; S(0) -> S(0)"),
    (aten.mean.dim, (T("B", 3), [0]), "P -> P"),
    (aten.trace.default, (T("B", "B"),), "P -> P"),
    (aten.dist.default, (T("B"), T("B")), ""),
    (aten._is_all_true.default, (T("B", dtype=BOOL),), ""),
    (aten._is_any_true.default, (T("B", dtype=BOOL),), ""),
]


@pytest.mark.parametrize(("target", "args", "expected"), SUMS, ids=str)
def test_sums(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args) == listed(expected)


def test_a_sum_that_rounds_its_terms_does_not_keep_them() -> None:
    assert check(aten.sum.dim_IntList, T("B", 3), [1], dtype=torch.float32, splits=((2, 1, 0),)) == listed(
        "S(0) -> S(0)"
    )


WHOLE = [t for t in registry.targets() if registry[t].name == "whole_reduction"]
_BEFORE_DIM: dict[OpOverload, tuple[Any, ...]] = {
    aten.kthvalue.default: (2,),
    aten.linalg_vector_norm.default: (3,),
    aten.norm.Scalar: (2,),
    aten.norm.ScalarOpt_dtype: (2,),
    aten.norm.ScalarOpt_dim: (2,),
    aten.norm.ScalarOpt_dim_dtype: (2,),
}


def reduce(target: OpOverload, dim: int | None, keepdim: bool = False) -> frozenset[str]:
    """The op's alternatives on `[2, B, 3]`, reduced over one dim or all."""
    kinds = {a.name: str(a.type) for a in target._schema.arguments}
    args: list[Any] = [T(2, "B", 3), *_BEFORE_DIM.get(target, ())]
    kwargs: dict[str, Any] = {}
    if target in (aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype):
        kwargs["dtype"] = torch.float64
    if dim is not None:
        kwargs |= {"dim": [dim] if "List" in kinds["dim"] else dim, "keepdim": keepdim}
    return check(target, *args, **kwargs, splits=((3, 1, 0, 2), (2, 2)))


@pytest.mark.parametrize("target", WHOLE, ids=str)
def test_reductions_of_a_whole_dim(target: OpOverload) -> None:
    if "dim" not in [a.name for a in target._schema.arguments]:
        assert reduce(target, None) == frozenset()
        return
    results = len(target._schema.returns)
    for dim, keepdim, left in ((0, False, 0), (0, True, 1), (2, False, 1), (-1, True, 1)):
        outputs = ", ".join([f"S({left})"] * results)
        assert reduce(target, dim, keepdim) == {f"S(1) -> {outputs}"}
    assert reduce(target, 1) == frozenset()


def test_no_dims_are_all_dims() -> None:
    for target in (aten.amax.default, aten.linalg_vector_norm.default, aten.var.correction):
        before = _BEFORE_DIM.get(target, ())
        assert check(target, T("B", 3), *before, [], splits=((3, 1, 0, 2),)) == frozenset()


def test_gradient_of_a_selecting_reduction() -> None:
    op = aten.value_selecting_reduction_backward.default
    flat = check(op, T("B"), 1, T("B", dtype=I64, high=3), ["B", 3], False)
    kept = check(op, T(1, "B"), 0, T(1, "B", dtype=I64, high=3), [3, "B"], True)
    assert flat == listed("S(0), S(0) -> S(0); P, R -> P")
    assert kept == listed("S(1), S(1) -> S(1); P, R -> P")


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    at=st.integers(0, 2),
    dims=st.sets(st.integers(0, 2), min_size=1),
    keepdim=st.booleans(),
    factor=st.sampled_from([1, 2]),
)
def test_any_sum_keeps_or_adds_up_the_batch(at: int, dims: set[int], keepdim: bool, factor: int) -> None:
    shape: list[Any] = [2, 3, 2]
    shape[at] = f"{factor}*B"
    found = check(aten.sum.dim_IntList, T(*shape), sorted(dims), keepdim, splits=((2, 0, 1),))
    assert len(found) == 1 + factor
    assert all(a.endswith("P(sum)") == (at in dims) for a in found if a.startswith("S"))
