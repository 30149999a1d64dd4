"""cat, stack, split, unbind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from fxdp.ir.types.sizes import B
from tests.rules.harness import T, check, listed, shown

aten = torch.ops.aten
X = T("B", 4)

CASES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.cat.default, ([X, X], 1), "P, P -> P; S(0), S(0) -> S(0)"),
    (aten.cat.default, ([X, X],), "P, P -> P; S(0), S(0) -> S(0, 2)"),
    (aten.cat.default, ([X, X, X], -2), "P, P, P -> P; S(0), S(0), S(0) -> S(0, 3)"),
    (aten.cat.default, ([T("2*B"), T("B")],), "P, P -> P; S(0, 2), S(0) -> S(0, 3)"),
    (
        aten.cat.default,
        ([T("4*B"), T("2*B")],),
        "P, P -> P; S(0, 2), S(0) -> S(0, 3); S(0, 4), S(0, 2) -> S(0, 6)",
    ),
    (aten.cat.default, ([T("B"), T(3)],), "P, P -> P"),
    (aten.cat.default, ([T("B", 2), T(0)], 1), "P, P -> P"),
    (aten.cat.default, ([X, T(0, 4), X],), "P, P, P -> P; S(0), R, S(0) -> S(0, 2)"),
    (aten.stack.default, ([X, X], 0), "P, P -> P; S(0), S(0) -> S(1)"),
    (aten.stack.default, ([X, X], -1), "P, P -> P; S(0), S(0) -> S(0)"),
    (aten._stack.default, ([X, X], 1), "P, P -> P; S(0), S(0) -> S(0)"),
    (aten.unbind.int, (T(2, "B"),), "P -> P, P; S(1) -> S(0), S(0)"),
    (aten.unbind.int, (T("B", 2), -1), "P -> P, P; S(0) -> S(0), S(0)"),
    (aten.split.Tensor, (T("B", 5), 2, 1), "P -> P, P, P; S(0) -> S(0), S(0), S(0)"),
    (aten.split.Tensor, (T("2*B"), "B"), "P -> P, P; S(0, 2) -> S(0), S(0)"),
    (aten.split.Tensor, (T("3*B"), "2*B"), "P -> P, P; S(0, 3) -> S(0, 2), S(0)"),
    (aten.unsafe_split.Tensor, (T("2*B"), "B"), "P -> P, P; S(0, 2) -> S(0), S(0)"),
    (aten.split_with_sizes.default, (T("3*B"), ["B", "2*B"]), "P -> P, P; S(0, 3) -> S(0), S(0, 2)"),
    (aten.split_with_sizes.default, (T("B"), [1, "B-1"]), "P -> P, P"),
    (aten.unsafe_split_with_sizes.default, (X, [1, 3], 1), "P -> P, P; S(0) -> S(0), S(0)"),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_joins(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args) == listed(expected)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(factors=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
def test_blocks_add_up_and_come_apart_again(factors: list[int]) -> None:
    process_mesh = check(aten.cat.default, [T(k * B, 2) for k in factors], splits=((2, 0, 1),))
    apart = check(
        aten.split_with_sizes.default, T(sum(factors) * B, 2), [k * B for k in factors], splits=((2, 0, 1),)
    )

    def reversed_(alternatives: frozenset[str]) -> set[str]:
        return {" -> ".join(reversed(a.split(" -> "))) for a in alternatives}

    assert process_mesh == reversed_(apart)
    assert len(process_mesh) >= 2
