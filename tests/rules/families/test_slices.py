"""slice, select, unfold, diagonals and triangles, and their backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from fxdp.ir.types.sizes import B
from fxdp.rules.proof.samples import NoSizeError
from tests.rules.harness import T, check, listed, shown

aten = torch.ops.aten
MAX = 2**63 - 1
ONE = "P -> P; S(0) -> S(0)"
TWO = "P, P -> P; S(0), S(0) -> S(0)"

SLICES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.slice.Tensor, (T("B", 4), 1, 1, 3), ONE),
    (aten.slice.Tensor, (T("B", 4), 0, 0, MAX), ONE),
    (aten.slice.Tensor, (T("B", 4), 0, None, B), ONE),
    (aten.slice.Tensor, (T("B", 4), 0, 1, MAX), "P -> P"),
    (aten.slice.Tensor, (T("B", 4), 0, 0, B - 1), "P -> P"),
    (aten.slice.Tensor, (T("2*B", 4), 0, 0, B), "P -> P; S(0, 2) -> S(0)"),
    (aten.slice.Tensor, (T("2*B", 4), 0, B, MAX), "P -> P; S(0, 2) -> S(0)"),
    (aten.slice.Tensor, (T("2*B", 4), 0, -B, None), "P -> P; S(0, 2) -> S(0)"),
    (aten.slice.Tensor, (T("4*B"), 0, B, 3 * B), "P -> P; S(0, 4) -> S(0, 2)"),
    (aten.slice.Tensor, (T("4*B"), 0, 0, -2 * B), "P -> P; S(0, 2) -> S(0); S(0, 4) -> S(0, 2)"),
    (aten.slice.Tensor, (T("4*B"), 0, 1, MAX, 2), "P -> P; S(0) -> S(0); S(0, 2) -> S(0, 2)"),
    (aten.slice_backward.default, (T("B", 2), ["B", 4], 1, 1, 3, 1), ONE),
    (aten.slice_backward.default, (T("B", 4), ["B", 4], 0, 0, MAX, 1), ONE),
    (aten.slice_backward.default, (T("B", 4), ["2*B", 4], 0, B, MAX, 1), "P -> P; S(0) -> S(0, 2)"),
    (aten.slice_backward.default, (T("2*B"), ["4*B"], 0, B, 3 * B, 1), "P -> P; S(0, 2) -> S(0, 4)"),
    (aten.slice_backward.default, (T("2*B"), ["4*B"], 0, 1, MAX, 2), ONE + "; S(0, 2) -> S(0, 2)"),
    (aten.slice_backward.default, (T("B - 1"), ["B"], 0, 1, MAX, 1), "P -> P"),
    (aten.slice_scatter.default, (T("B", 4), T("B", 2), 1, 0, 2), TWO),
    (aten.slice_scatter.default, (T("B"), T("B"), 0, 0, MAX), TWO),
    (aten.slice_scatter.default, (T("2*B"), T("B"), 0, B, MAX), "P, P -> P; S(0, 2), S(0) -> S(0, 2)"),
    (aten.select.int, (T(2, "B"), 0, -1), "P -> P; S(1) -> S(0)"),
    (aten.select.int, (T("B", 2), 0, 0), "P -> P"),
    (aten.select_backward.default, (T("B"), [2, "B"], 0, 1), "P -> P; S(0) -> S(1)"),
    (aten.select_backward.default, (T(3), ["B", 3], 0, 0), "P -> P"),
    (aten.select_scatter.default, (T(2, "B"), T("B"), 0, 1), "P, P -> P; S(1), S(0) -> S(1)"),
    (aten.select_scatter.default, (T("B", 2), T(2), 0, 0), "P, P -> P"),
    (aten.unfold.default, (T("B", 5), 1, 3, 1), ONE),
    (aten.unfold.default, (T("B", 5), 0, 1, 1), "P -> P"),
    (aten.unfold_backward.default, (T("B", 3, 3), ["B", 5], 1, 3, 1), ONE),
]


@pytest.mark.parametrize(("target", "args", "expected"), SLICES, ids=shown)
def test_slices(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args) == listed(expected)


BOTH = "P -> P; S(0) -> S(0); S(1) -> S(1)"

DIAGONALS: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.diagonal.default, (T("B", "B"),), "P -> P; S(0) -> S(0); S(1) -> S(0)"),
    (aten.diagonal.default, (T(3, "B", "B"), 0, -1, 1), "P -> P; S(1) -> S(1); S(2) -> S(1)"),
    (aten.diagonal.default, (T("B", 3, 4), 1, 1, 2), ONE),
    (aten.diagonal.default, (T("B", "2*B"), B), ONE),
    (aten.diagonal.default, (T("2*B", "2*B"),), "P -> P; S(0) -> S(0); S(1) -> S(0)"),
    (aten.diagonal.default, (T("B", "B"), 1), "P -> P"),  # B - 1 of them
    (aten.diagonal.default, (T("B", "B+1"), 1), ONE),
    (aten.diagonal_backward.default, (T("B"), ["B", "B"], 0, 0, 1), "P -> P; S(0) -> S(0); S(0) -> S(1)"),
    (aten.diagonal_backward.default, (T("B", 2), ["B", 2, 3], 1, 1, 2), ONE),
    (aten.diag_embed.default, (T("B", 2),), ONE),
    (aten.diag_embed.default, (T("B", 2), 1, 0, 2), "P -> P; S(0) -> S(1)"),
    (aten.diag_embed.default, (T("B"),), "P -> P"),
    (aten.diagonal_scatter.default, (T("B", "B"), T("B")), TWO + "; S(1), S(0) -> S(1)"),
    (aten.diagonal_scatter.default, (T("B", 2, 2), T("B", 2), 0, 1, 2), TWO),
    (aten.tril.default, (T("B", "2*B"), 1), BOTH),
    (aten.triu.default, (T("B", "B"),), BOTH),
    (aten.triu.default, (T("B", 3, 4), 1), ONE),
    (aten.tril.default, (T("2*B", 3), B), ONE),
]


@pytest.mark.parametrize(("target", "args", "expected"), DIAGONALS, ids=shown)
def test_diagonals(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    splits = ((3, 1, 0, 2), (2, 4), (0, 2))  # one sample has too short a diagonal for a `B + 1`
    assert check(target, *args, splits=splits) == listed(expected)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    blocks=st.sampled_from([1, 2, 3, 4]),
    start=st.one_of(st.none(), st.integers(-4, 4).map(lambda k: k * B), st.integers(0, 3)),
    end=st.one_of(st.none(), st.just(MAX), st.integers(-4, 4).map(lambda k: k * B)),
    step=st.sampled_from([1, 1, 2]),
)
def test_any_slice_of_any_blocks(blocks: int, start: Any, end: Any, step: int) -> None:
    """Whatever the bounds, an answer is exact; entire blocks of step 1 always have one."""
    try:
        found = check(aten.slice.Tensor, T(blocks * B), 0, start, end, step, splits=((3, 1, 0, 4), (4, 4)))
    except NoSizeError:  # the bounds cross for some batches
        return
    full = start in (None, 0) and end in (None, MAX)
    assert not full or step != 1 or "S(0) -> S(0)" in found
