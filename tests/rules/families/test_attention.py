"""Fused attention on virtual ranks (CPU), and the structure of the alternatives of the CUDA ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.registry import Op, Operand, registry
from tests.rules.harness import T, check, shown, spelled

aten = torch.ops.aten
Q, KV, LSE = T("B", 2, 5, 8), T("B", 2, 3, 8), T("B", 2, 5)
flash = aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("causal", [False, True])
def test_flash_for_cpu(causal: bool) -> None:
    assert "S(0), S(0), S(0) -> S(0), S(0)" in check(flash, Q, Q, Q, 0.0, causal)


@pytest.mark.parametrize(
    ("mask", "placement"), [(T(5, 3), "R"), (T(1, 1, 5, 3), "R"), (T("B", 1, 5, 3), "S(0)")], ids=shown
)
def test_flash_for_cpu_with_a_mask(mask: T, placement: str) -> None:
    assert f"S(0), S(0), S(0), {placement} -> S(0), S(0)" in check(flash, Q, KV, KV, attn_mask=mask)


@pytest.mark.parametrize(
    ("mask", "placement"), [(None, ""), (T(5, 3), ", R"), (T("B", 1, 5, 3), ", S(0)")], ids=shown
)
def test_flash_for_cpu_backward(mask: T | None, placement: str) -> None:
    found = check(flash_backward, Q, Q, KV, KV, Q, LSE, 0.0, False, attn_mask=mask)
    assert f"S(0), S(0), S(0), S(0), S(0), S(0){placement} -> S(0), S(0), S(0)" in found


def test_composite_attention() -> None:
    found = check(aten._scaled_dot_product_attention_math.default, Q, KV, KV, T("B", 1, 5, 3))
    assert "S(0), S(0), S(0), S(0) -> S(0), S(0)" in found
    found = check(
        aten.scaled_dot_product_attention.default, T("B", 5, 8), T("B", 3, 8), T("B", 3, 8), T(5, 3)
    )
    assert "S(0), S(0), S(0), R -> S(0)" in found


def test_composite_attention_of_one_query_for_all_samples_stays_whole() -> None:
    one = T(1, 2, 5, 8)
    assert check(aten.scaled_dot_product_attention.default, one, KV, KV) == frozenset()


def alternatives(target: Any, values: Sequence[Any], outputs: Sequence[tuple[Dim, ...] | None]) -> set[str]:
    """What the rule says of an op that this machine cannot run; tuples are shapes of operands."""
    operands: list[Operand] = []

    def argument(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        operands.append(Operand(len(operands), TensorType(torch.float32, value)))
        return operands[-1]

    args = tuple(map(argument, values))
    types = tuple(None if s is None else TensorType(torch.float32, s) for s in outputs)
    found = registry[target].rule(Op(target, args, (), tuple(operands), types))
    return set(map(spelled, found))


QUERY, STATE = (B, 2, 5, 8), (B, 2, 5)
SEED: tuple[Dim, ...] = ()


def test_cuda_flash() -> None:
    found = alternatives(
        aten._scaled_dot_product_flash_attention.default,
        [QUERY, QUERY, QUERY, 0.0, True],
        [QUERY, STATE, None, None, None, None, (2,), SEED, (0,)],
    )
    assert found == {"S(0), S(0), S(0) -> S(0), S(0), -, -, -, -, R, R, R"}
    found = alternatives(
        aten._scaled_dot_product_flash_attention_backward.default,
        [QUERY, QUERY, QUERY, QUERY, QUERY, STATE, None, None, 5, 5, 0.0, True, (2,), SEED],
        [QUERY] * 3,
    )
    assert found == {"S(0), S(0), S(0), S(0), S(0), S(0), R, R -> S(0), S(0), S(0)"}


def test_cuda_efficient() -> None:
    found = alternatives(
        aten._scaled_dot_product_efficient_attention.default,
        [QUERY, QUERY, QUERY, (1, 2, 5, 5), True],
        [QUERY, (B, 2, 32), SEED, SEED],
    )
    assert found == {"S(0), S(0), S(0), R -> S(0), S(0), R, R"}
    operands = [QUERY, QUERY, QUERY, QUERY, (1, 2, 5, 5), QUERY, (B, 2, 32), SEED, SEED]
    found = alternatives(
        aten._scaled_dot_product_efficient_attention_backward.default,
        [*operands, 0.0, [True] * 4],
        [QUERY, QUERY, QUERY, (1, 2, 5, 5)],
    )
    assert found == {"S(0), S(0), S(0), S(0), R, S(0), S(0), R, R -> S(0), S(0), S(0), P(sum)"}


def test_cuda_cudnn() -> None:
    found = alternatives(
        aten._scaled_dot_product_cudnn_attention.default,
        [QUERY, QUERY, QUERY, (B, 1, 5, 5), True],
        [QUERY, (B, 2, 5, 1), None, None, None, None, SEED, SEED, None],
    )
    assert found == {"S(0), S(0), S(0), S(0) -> S(0), S(0), -, -, -, -, R, R, -"}
    found = alternatives(
        aten._scaled_dot_product_cudnn_attention_backward.default,
        [
            QUERY,
            QUERY,
            QUERY,
            QUERY,
            QUERY,
            (B, 2, 5, 1),
            SEED,
            SEED,
            (B, 1, 5, 5),
            None,
            None,
            5,
            5,
            0.0,
            False,
        ],
        [QUERY] * 3,
    )
    assert found == {"S(0), S(0), S(0), S(0), S(0), S(0), R, R, S(0) -> S(0), S(0), S(0)"}


def test_a_debug_mask_needs_the_whole_batch() -> None:
    found = alternatives(
        aten._scaled_dot_product_flash_attention.default,
        [QUERY, QUERY, QUERY, 0.0, False, True],
        [QUERY, STATE, None, None, None, None, (2,), SEED, (B, 2, 5, 5)],
    )
    assert found == set()
