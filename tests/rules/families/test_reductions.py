"""Sums, means, extrema, norms, statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from fxdp.ir.types.sizes import B
from fxdp.rules.registry import registry
from tests.rules.harness import T, check, listed, shown

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


@pytest.mark.parametrize(("target", "args", "expected"), SUMS, ids=shown)
def test_sums(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args) == listed(expected)


def test_a_sum_that_rounds_its_terms_does_not_keep_them() -> None:
    assert check(aten.sum.dim_IntList, T("B", 3), [1], dtype=torch.float32, splits=((2, 1, 0),)) == listed(
        "S(0) -> S(0)"
    )


PARTS = [
    t for t in registry.targets()
    if registry[t].name in ("extremum", "extremum_with_position", "vector_norm", "logsumexp")
]  # fmt: skip
FULL = [t for t in registry.targets() if registry[t].name == "full_reduction"]
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


@pytest.mark.parametrize("target", FULL, ids=shown)
def test_reductions_of_a_whole_dim(target: OpOverload) -> None:
    if "dim" not in [a.name for a in target._schema.arguments]:
        assert reduce(target, None) == frozenset()
        return
    results = len(target._schema.returns)
    for dim, keepdim, left in ((0, False, 0), (0, True, 1), (2, False, 1), (-1, True, 1)):
        outputs = ", ".join([f"S({left})"] * results)
        assert reduce(target, dim, keepdim) == {f"S(1) -> {outputs}"}
    assert reduce(target, 1) == frozenset()


@pytest.mark.parametrize("target", PARTS, ids=shown)
def test_extrema_of_a_whole_dim(target: OpOverload) -> None:
    names = [a.name for a in target._schema.arguments]
    if "dim" in names:
        for dim, left in ((0, 0), (2, 1)):
            outputs = ", ".join([f"S({left})"] * len(target._schema.returns))
            assert reduce(target, dim) == {f"S(1) -> {outputs}"}
    (over_the_batch,) = reduce(target, 1 if "dim" in names else None)
    assert not over_the_batch.endswith("-> S(0)")


def test_no_dims_are_all_dims() -> None:
    assert check(aten.var.correction, T("B", 3), [], splits=((3, 1, 0, 2),)) == frozenset()
    assert check(aten.amax.default, T("B", 3), [], splits=((3, 1, 0, 2),)) == listed("S(0) -> P(max)")
    norm = check(aten.linalg_vector_norm.default, T("B", 3), 3, [], splits=((3, 1, 0, 2),))
    assert norm == listed("S(0) -> R")


def with_nan(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Numbers with many ties, an infinity and a nan."""
    value = torch.randint(0, 3, shape, generator=generator).double()
    value.view(-1)[-1], value.view(-1)[0] = float("nan"), float("-inf")
    return value


TIED = T(2, "2*B", 3, dtype=I64, high=3)
NANS = T(2, "2*B", 3, fill=with_nan)
BITS = T(2, "2*B", 3, dtype=BOOL)
OUT_OF_PARTS: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    *((op, (x, [1, 2]), "P(max)") for op in (aten.amax.default,) for x in (TIED, NANS, BITS)),
    *((op, (x, [1], True), "P(min)") for op in (aten.amin.default,) for x in (TIED, NANS, BITS)),
    (aten.max.default, (NANS,), "P(max)"),
    (aten.min.default, (TIED,), "P(min)"),
    *((op, (BITS,), "P(max)") for op in (aten.any.default,)),
    (aten.any.dim, (NANS, 1), "P(max)"),
    (aten.any.dims, (BITS, [0, 1], True), "P(max)"),
    (aten.all.default, (NANS,), "P(min)"),
    (aten.all.dim, (BITS, 1, True), "P(min)"),
    (aten.all.dims, (BITS, [0, 1]), "P(min)"),
    *((aten.max.dim, (x, 1), "R, R") for x in (TIED, NANS, BITS)),
    *((aten.min.dim, (x, 1, True), "R, R") for x in (TIED, NANS)),
    *((aten.argmax.default, (x, 1, True), "R") for x in (TIED, NANS)),
    *((aten.argmin.default, (x, -2), "R") for x in (TIED, NANS)),
    (aten.logsumexp.default, (NANS, [1, 2], True), "R"), (aten.logsumexp.default, (NANS, [1]), "R"),
    (aten.logsumexp.default, (T(2, "2*B", 3), [1, 2]), "R"),
    *((aten.linalg_vector_norm.default, (T(2, "2*B", 3), order, [1, 2], keep), "R")
      for order, keep in ((0, False), (1, True), (2, False), (3.5, True), (float("inf"), False))),
    (aten.linalg_vector_norm.default, (T(2, "2*B", 3), float("-inf")), "R"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "args", "result"), OUT_OF_PARTS, ids=shown)
def test_reductions_of_a_dim_in_parts(target: OpOverload, args: tuple[Any, ...], result: str) -> None:
    """One number per slice of each rank is enough, also with ties, nan and infinities."""
    if target in (aten.argmax.default, aten.max.dim) and args[0] is BITS:
        args = (T(2, "2*B", 3, dtype=BOOL), *args[1:])
    found = check(target, *args, splits=((3, 1, 0, 2), (0, 1)))
    assert found == listed(f"S(1) -> {result}; S(1, 2) -> {result}")


def test_positions_of_all_dims_as_one_are_not_told_by_parts() -> None:
    assert check(aten.argmax.default, TIED, splits=((3, 1, 0, 2),)) == frozenset()


def test_gradient_of_a_selecting_reduction() -> None:
    op = aten.value_selecting_reduction_backward.default
    flat = check(op, T("B"), 1, T("B", dtype=I64, high=3), ["B", 3], False)
    kept = check(op, T(1, "B"), 0, T(1, "B", dtype=I64, high=3), [3, "B"], True)
    assert flat == listed("S(0), S(0) -> S(0); P, R -> P")
    assert kept == listed("S(1), S(1) -> S(1); P, R -> P")


def test_each_rank_fills_in_its_own_rows_of_a_selection() -> None:
    op = aten.value_selecting_reduction_backward.default
    for keepdim, shape in ((False, (3,)), (True, (1, 3))):
        indices = T(*shape, dtype=I64, high=B)
        found = check(op, T(*shape), 0, indices, ["B", 3], keepdim, splits=((3, 1, 0, 2), (0, 1)))
        assert found == listed("P, R -> P; R, R -> S(0)")


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
