"""Rules for ops that users register."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fxdp
from fxdp.errors import InputError, RuleError
from fxdp.rules import Alternative, Op, S
from fxdp.rules.registry import registry

aten = torch.ops.aten


@torch.library.custom_op("fxdp_tests::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    return x * weight if shift is None else x * weight + shift


@torch.library.custom_op("fxdp_tests::scaled_backward", mutates_args=())
def scaled_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad * weight, (grad * x).sum(0)


@torch.library.custom_op("fxdp_tests::process_mesh", mutates_args=())
def process_mesh(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


@torch.library.custom_op("fxdp_tests::overwritten", mutates_args={"x"})
def overwritten(x: Tensor) -> None:
    x.zero_()


OPS = torch.ops.fxdp_tests
X, WEIGHT, SHIFT = fxdp.Sample("B", 3), fxdp.Sample(3), fxdp.Sample(3)


@pytest.fixture(autouse=True)
def _no_rules_are_left() -> Iterator[None]:
    yield
    registry.remove(OPS.scaled, OPS.scaled_backward, OPS.process_mesh)


def test_labels() -> None:
    fxdp.register_rule(scaled, labels="n_, _, _ -> n_")
    fxdp.register_rule(scaled_backward, labels="n_, n_, _ -> n_, _", linear_in=["grad"])
    assert fxdp.check_rule(scaled, X, WEIGHT, SHIFT) == ("S(0), R, R -> S(0)",)
    assert fxdp.check_rule(scaled, X, WEIGHT, None) == ("S(0), R -> S(0)",)
    assert set(fxdp.check_rule(scaled_backward, X, X, WEIGHT)) == {
        "S(0), S(0), R -> S(0), P(sum)",
        "P(sum), R, R -> P(sum), P(sum)",
    }
    assert registry[OPS.scaled.default].kind == "batched"
    assert registry[OPS.scaled_backward.default].kind == "contracted"


def test_dots_are_any_number_of_whole_dims() -> None:
    fxdp.register_rule(scaled, labels="n..., ..., _ -> n...")
    assert fxdp.check_rule(scaled, fxdp.Sample("2*B", 4, 3), fxdp.Sample(4, 3), None) == (
        "S(0), R -> S(0)",
        "S(0, 2), R -> S(0, 2)",
    )


def test_labels_for_another_rank_leave_the_op_whole() -> None:
    fxdp.register_rule(scaled, labels="n_, _, _ -> n_")
    assert fxdp.check_rule(scaled, fxdp.Sample("B"), fxdp.Sample("B"), None) == ()


def test_pointwise() -> None:
    fxdp.register_rule(OPS.scaled, pointwise=True)
    assert fxdp.check_rule(OPS.scaled.default, X, WEIGHT, SHIFT) == ("S(0), R, R -> S(0)",)


def test_a_rule_as_a_function() -> None:
    @fxdp.register_rule(OPS.process_mesh.default)
    def joined_rows(op: Op) -> Iterator[Alternative]:
        yield op.alternative({o.index: S(0) for o in op.operands}, S(0, len(op.operands)))

    assert registry[OPS.process_mesh.default].name == "joined_rows"
    assert fxdp.check_rule(process_mesh, [X, X]) == ("S(0), S(0) -> S(0, 2)",)


def test_a_wrong_rule_is_caught() -> None:
    fxdp.register_rule(scaled_backward, labels="nm, nm, m -> nm, n")
    square = fxdp.Sample("B", "B")
    with pytest.raises(RuleError, match=r"scaled_backward.default: S\(0\), S\(0\), R -> S\(0\), S\(0\)"):
        fxdp.check_rule(scaled_backward, square, square, fxdp.Sample("B"))
    registry.remove(OPS.scaled_backward)
    fxdp.register_rule(scaled_backward, labels="n..., n..., ... -> n..., ...", linear_in=["x"])
    with pytest.raises(RuleError, match=r"R, P\(sum\), R -> P\(sum\), P\(sum\)"):
        fxdp.check_rule(scaled_backward, X, X, WEIGHT)


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ((), {}, "got no op"),
    ((len,), {}, "a Python function is traced through"),
    ((overwritten,), {"pointwise": True}, "writes its arguments"),
    ((aten.mm.default,), {"pointwise": True}, r"mm.default \(rule 'product_of_two'\) already registered"),
    ((scaled,), {"labels": "n_, _ -> n_"}, r"3 tensor arguments \['x', .* 'shift'\], got labels for 2"),
    ((scaled,), {"labels": "n_, _, _ -> n_, _"}, "has 1 results, got labels for 2"),
    ((scaled,), {"labels": "n_, _, _"}, "there is no '->'"),
    (
        (scaled,),
        {"labels": "nn, 1, _ -> m_"},
        r"'nn' is not one letter.*'1' is not.*the results have \['m'\]",
    ),
    ((process_mesh,), {"labels": "n_ -> n_"}, "takes lists of tensors"),
    ((scaled,), {"labels": "n_, _, _ -> n_", "pointwise": True}, "expected one of them"),
    ((scaled,), {"pointwise": True, "linear_in": ["grad"]}, r"no argument \['grad'\]"),
    ((scaled,), {"linear_in": ["x"]}, "goes with labels or pointwise"),
]


@pytest.mark.parametrize(("ops", "options", "message"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_says_what_is_expected(ops: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="(?i)" + message):
        fxdp.register_rule(*ops, **options)
    assert registry.get(OPS.scaled.default) is None


def test_an_op_has_one_rule() -> None:
    fxdp.register_rule(scaled, pointwise=True)
    with pytest.raises(InputError, match="already registered; an op has one rule"):
        fxdp.register_rule(scaled_backward, OPS.scaled, pointwise=True)
    assert registry.get(OPS.scaled_backward.default) is None


def test_only_ops_with_a_rule_can_be_checked() -> None:
    with pytest.raises(InputError, match="expected an op overload that has a rule"):
        fxdp.check_rule(scaled, X, WEIGHT, None)
