"""Random ops: shapes, and that a mask fits its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fxdp.rules.registry import registry
from tests.rules.harness import T, check, listed, shown

aten = torch.ops.aten
X, PROBABILITY = T("B", 3), T("B", 3, low=0, high=1)
LIKE = "S(0) -> S(0); P -> R"
ONE = "S(0) -> S(0)"

CASES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.bernoulli.default, (PROBABILITY,), ONE),
    (aten.bernoulli.p, (X, 0.5), LIKE),
    (aten.bernoulli.Tensor, (X, T(3, low=0, high=1)), "S(0), R -> S(0)"),
    (aten.poisson.default, (PROBABILITY,), ONE),
    (aten._standard_gamma.default, (PROBABILITY,), ONE),
    (aten.binomial.default, (T("B", low=3, high=4), T("B", low=0, high=1)), "S(0), S(0) -> S(0)"),
    (aten.normal.Tensor_float, (X, 1.0), ONE),
    (aten.normal.float_Tensor, (0.0, PROBABILITY), ONE),
    (aten.normal.Tensor_Tensor, (X, T("B", 1, low=0, high=1)), "S(0), S(0) -> S(0)"),
    (aten.rand_like.default, (X,), LIKE),
    (aten.randn_like.default, (X,), LIKE),
    (aten.randint_like.default, (X, 5), LIKE),
    (aten.randint_like.low_dtype, (X, 2, 5), LIKE),
    (aten.uniform.default, (X,), LIKE),
    (aten.normal_functional.default, (X,), LIKE),
    (aten.exponential.default, (X,), LIKE),
    (aten.geometric.default, (X, 0.5), LIKE),
    (aten.cauchy.default, (X,), LIKE),
    (aten.log_normal.default, (X,), LIKE),
    (aten.random.default, (X,), LIKE),
    (aten.random.to, (X, 5), LIKE),
    (getattr(aten.random, "from"), (X, 2, 5), LIKE),
    (aten.rrelu_with_noise_functional.default, (X, X, 0.1, 0.3, True), "S(0), S(0) -> S(0), S(0)"),
    (aten.multinomial.default, (PROBABILITY, 2), ONE),
    (aten.multinomial.default, (T("B", low=1, high=2), 2), ""),
    (aten._sample_dirichlet.default, (PROBABILITY,), ONE),
    (aten.randperm.default, ("B",), ""),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_shapes(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args, random=True) == listed(expected)
    assert registry[target].family == "random"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.rand.default, (["B", 2],)),
        (aten.randn.default, (["B", 2],)),
        (aten.randint.default, (5, ["B", 2])),
        (aten.randint.low, (2, 5, ["B", 2])),
        (aten.normal.float_float, (0.0, 1.0, ["B", 2])),
    ],
    ids=str,
)
def test_of_a_size(target: OpOverload, args: tuple[Any, ...]) -> None:
    assert check(target, *args, random=True) == {" -> S(0)"}


def _mask_fits(args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
    value, mask = results
    torch.testing.assert_close(value, args[0] * mask / 0.75)


def test_dropout_scales_what_its_mask_keeps() -> None:
    found = check(aten.native_dropout.default, X, 0.25, True, random=True, law=_mask_fits)
    assert found == listed("S(0) -> S(0), S(0)")


def test_dropout_in_eval_is_exact() -> None:
    # (of an empty part torch's mask is no bool; nobody reads it)
    found = check(aten.native_dropout.default, X, 0.25, False, splits=((3, 1, 2), (4,)))
    assert found == listed("S(0) -> S(0), S(0)")
