"""Sizes that are remembered are those that torch computes."""

from __future__ import annotations

import operator

import torch
from torch.fx.experimental.sym_node import SymNode

from fxdp.torch_compat import quick_sizes, symbolic_sizes

_OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
)  # fmt: skip


def _answers(repeat: int) -> list[str]:
    _, sizes = symbolic_sizes({"a": 6, "c": 4})
    given = [sizes["a"], sizes["c"], 2 * sizes["a"] + sizes["c"], 6, 1]
    found = []
    for _ in range(repeat):
        for op in _OPERATORS:
            made = [op(x, y) for x in given for y in given]
            found = [f"{n.node.expr} {n.node.hint} {n.node.pytype}" for n in made if not isinstance(n, int)]
    return found


def test_remembered_sizes_are_those_of_torch() -> None:
    plain = _answers(1)
    with quick_sizes():
        assert _answers(2) == plain


def test_an_answer_is_an_object_of_its_own_in_its_own_environment() -> None:
    """Tracers tell sizes apart by identity, and guards belong to an environment."""
    with quick_sizes():
        _, one = symbolic_sizes({"a": 6})
        _, two = symbolic_sizes({"a": 6})
        first, again, other = one["a"] + 1, one["a"] + 1, two["a"] + 1
    assert first.node is not again.node
    assert other.node.shape_env is two["a"].node.shape_env is not first.node.shape_env


def test_a_size_that_became_a_number_is_a_number() -> None:
    with quick_sizes():
        _, sizes = symbolic_sizes({"a": 6})
        size = sizes["a"] + 1
        assert size.node.maybe_as_int() is None
        torch._check(sizes["a"] == 6)
        assert (sizes["a"] + 1).node.maybe_as_int() == size.node.maybe_as_int() == 7


def test_torch_is_put_back() -> None:
    before = dict(vars(SymNode))
    with quick_sizes():
        assert dict(vars(SymNode)) != before
    assert dict(vars(SymNode)) == before
