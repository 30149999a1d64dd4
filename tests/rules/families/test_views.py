"""view, expand, permute, squeeze, repeat; and the prefix law on random shapes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from fxdp.ir.types.placements import Dim, S
from fxdp.ir.types.sizes import B
from fxdp.rules.families.views import regrouped
from tests.rules.harness import T, check, listed, shown

aten = torch.ops.aten
SEVERAL = ((3, 1, 0, 2), (2, 4))  # a batch of one is squeezed, and torch does not do so symbolically

CASES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.view.default, (T(3, "B", 2), ["3*B", 2]), "P -> P; S(1) -> S(0, 3)"),
    (aten.view.default, (T("3*B", 2), [3, "B", 2]), "P -> P; S(0, 3) -> S(1)"),
    (aten.view.default, (T("B", 6), ["B", -1, 2]), "P -> P; S(0) -> S(0)"),
    (aten.view.default, (T("2*B", 3), ["B", -1]), "P -> P; S(0) -> S(0)"),
    (aten.view.default, (T("2*B", 3), ["6*B"]), "P -> P; S(0) -> S(0); S(0, 2) -> S(0, 2)"),
    (aten.view.default, (T("B", "B"), ["B*B"]), "P -> P"),  # B * B is no multiple of one batch
    (aten.view.default, (T("B", "B", 2), ["B", "2*B"]), "P -> P; S(0) -> S(0); S(1) -> S(1)"),
    (aten.view.default, (T("B", 4), [2, "2*B"]), "P -> P"),
    (aten._unsafe_view.default, (T("4*B"), [4, "B"]), "P -> P; S(0, 4) -> S(1)"),
    (aten.reshape.default, (T(2, "B"), ["2*B"]), "P -> P; S(1) -> S(0, 2)"),
    (aten.view.dtype, (T("B", 2), torch.int64), "S(0) -> S(0)"),
    (aten.view.dtype, (T("B", 2), torch.int32), "S(0) -> S(0)"),
    (aten.expand.default, (T(1, 3), ["B", 3]), "R -> S(0)"),
    (aten.expand.default, (T(3), ["B", -1]), "R -> S(0)"),
    (aten.expand.default, (T("B", 1), [2, "B", "B"]), "S(0) -> S(1); R -> S(2)"),
    (aten.expand.default, (T("2*B", 1), ["2*B", 4]), "S(0) -> S(0); S(0, 2) -> S(0, 2)"),
    (aten.permute.default, (T(2, "B", 3), [2, 0, -2]), "P -> P; S(1) -> S(2)"),
    (aten.transpose.int, (T(2, "B", 3), -2, 0), "P -> P; S(1) -> S(0)"),
    (aten.transpose.int, (T(2, "B", 3), 0, 2), "P -> P; S(1) -> S(1)"),
    (aten.t.default, (T("B", 2),), "P -> P; S(0) -> S(1)"),
    (aten.t.default, (T("B"),), "P -> P; S(0) -> S(0)"),
    (aten.unsqueeze.default, (T("B", 3), 0), "P -> P; S(0) -> S(1)"),
    (aten.unsqueeze.default, (T("B", 3), -1), "P -> P; S(0) -> S(0)"),
    (aten.view_as_real.default, (T("B", 3, dtype=torch.complex128),), "P -> P; S(0) -> S(0)"),
    (aten.view_as_complex.default, (T("B", 2),), "P -> P; S(0) -> S(0)"),
    (aten.repeat.default, (T("B", 2), [3, 2]), "S(0) -> S(0, 3)"),
    (aten.repeat.default, (T("2*B"), [2, 3]), "S(0) -> S(1, 3); S(0, 2) -> S(1, 6)"),
    (aten.repeat.default, (T("B", 2), [0, 1]), "P -> P"),
    (aten.repeat.default, (T("B", 2), [1, 0]), "P -> P; S(0) -> S(0)"),
    (aten.repeat.default, (T(2, 3), ["2*B", 1]), "R -> S(0)"),
    (aten.repeat.default, (T(2), ["B", 1]), "R -> S(0)"),
    (aten.repeat.default, (T("B", 2), [1, "B"]), "S(0) -> S(0); R -> S(1)"),
    (aten.repeat.default, (T("B"), ["B"]), ""),
    (aten.as_strided.default, (T("B", 3), [2, 2], [1, 1]), "P -> P"),
    (aten.as_strided_scatter.default, (T("B", 3), T(2, 2), [2, 2], [2, 1]), "P, P -> P"),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_views(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    strided = target in (aten.as_strided.default, aten.as_strided_scatter.default)
    splits = ((3, 1, 0, 2), (2, 4), (1, 1)) if strided else ((3, 1, 0, 2), (5,), (0, 1))
    assert check(target, *args, splits=splits) == listed(expected)


SQUEEZES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.squeeze.default, (T(1, "B", 1, 3),), "P -> P; S(1) -> S(0)"),
    (aten.squeeze.dim, (T(1, "B"), 1), "P -> P; S(1) -> S(1)"),
    (aten.squeeze.dim, (T(1, "B"), 0), "P -> P; S(1) -> S(0)"),
    (aten.squeeze.dim, (T("B", 2), -1), "P -> P; S(0) -> S(0)"),
    (aten.squeeze.dims, (T(1, "B", 1), [0, 1]), "P -> P; S(1) -> S(0)"),
]


@pytest.mark.parametrize(("target", "args", "expected"), SQUEEZES, ids=shown)
def test_a_single_local_sample_is_not_squeezed(
    target: OpOverload, args: tuple[Any, ...], expected: str
) -> None:
    assert check(target, *args, splits=SEVERAL) == listed(expected)


sizes = st.lists(st.sampled_from([1, 2, 3]), max_size=3)


def _grouped(factors: list[Dim], cuts: list[bool]) -> list[Dim]:
    shape: list[Dim] = [1]
    for factor, cut in zip(factors, [*cuts, *[False] * len(factors)], strict=False):
        if cut:
            shape.append(1)
        shape[-1] = shape[-1] * factor
    return shape


@settings(derandomize=True, deadline=None, max_examples=60)
@given(before=sizes, after=sizes, cuts=st.lists(st.booleans(), min_size=14, max_size=14))
def test_any_regrouping_of_the_factors_keeps_the_batch(
    before: list[int], after: list[int], cuts: list[bool]
) -> None:
    factors: list[Dim] = [*before, B, *after]
    shape, target = _grouped(factors, cuts[:7]), _grouped(factors, cuts[7:])
    found = check(aten.view.default, T(*shape), target, splits=((2, 0, 1),))
    assert any(a.startswith("S(") for a in found) == _batch_survives(
        tuple(shape), tuple(target), prod(before)
    )


def _batch_survives(shape: tuple[Dim, ...], target: tuple[Dim, ...], prefix: int) -> bool:
    """Both shapes have a dim that holds the batch; any shard that the first has is one of the second."""
    dim = next(d for d, n in enumerate(shape) if not isinstance(n, int))
    outer = prefix // prod(int(n) for n in shape[:dim])
    return regrouped(shape, S(dim, outer), target) is not None
