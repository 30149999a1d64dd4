"""Sizes that are remembered are those that torch computes."""

from __future__ import annotations

import operator
import sys
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode

import fxdp
from fxdp.startup.artifacts import cached_joint
from fxdp.startup.memoized import predicted_forward
from fxdp.startup.memoized.memoized_sizes import memoized_sizes
from fxdp.torch_compat import is_on, symbolic_sizes
from tests.torch_compat.taken import taken

_OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
)  # fmt: skip

_QUICK = sys.modules[memoized_sizes.__module__]
_REMEMBERS = pytest.mark.skipif(
    "_replacements_version_counter" not in vars(SymNode)["expr"].fget.__code__.co_names,
    reason="this torch keeps sizes in another way, which is left alone",
)


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
    with memoized_sizes():
        assert _answers(2) == plain


def test_an_answer_is_an_object_of_its_own_in_its_own_environment() -> None:
    """Tracers tell sizes apart by identity, and guards belong to an environment."""
    with memoized_sizes():
        _, one = symbolic_sizes({"a": 6})
        _, two = symbolic_sizes({"a": 6})
        first, again, other = one["a"] + 1, one["a"] + 1, two["a"] + 1
    assert first.node is not again.node
    assert other.node.shape_env is two["a"].node.shape_env is not first.node.shape_env


def test_a_size_that_became_a_number_is_a_number() -> None:
    with memoized_sizes():
        _, sizes = symbolic_sizes({"a": 6})
        size = sizes["a"] + 1
        assert size.node.maybe_as_int() is None
        torch._check(sizes["a"] == 6)
        assert (sizes["a"] + 1).node.maybe_as_int() == size.node.maybe_as_int() == 7


@_REMEMBERS
def test_sizes_that_became_equal_have_one_number_and_copies_have_it() -> None:
    """A number is that of an expression in its environment, as it is after what was replaced."""
    numbers = _QUICK._Numbers()
    with memoized_sizes():
        _, one = symbolic_sizes({"a": 6, "c": 6})
        _, two = symbolic_sizes({"a": 6})
        before = [numbers.of(n.node) for n in (one["a"], one["c"], two["a"])]
        assert len(set(before)) == 3
        torch._check(one["a"] == one["c"])
        assert numbers.of(one["a"].node) == numbers.of(one["c"].node)
        assert numbers.of(two["a"].node) == before[2]
        sums = [(one["a"] + 1).node for _ in range(2)]
    assert sums[0] is not sums[1]
    kept = [vars(n)["_fxdp_number"] for n in sums]
    assert kept[0] == kept[1]
    assert kept[0][1] is one["a"].node.shape_env


@_REMEMBERS
def test_torch_is_put_back() -> None:
    before = dict(vars(SymNode)), dict(vars(FunctionalTensor))
    with memoized_sizes():
        assert dict(vars(SymNode)) != before[0]
        assert (dict(vars(FunctionalTensor)) != before[1]) == is_on("memoized_wrappers")
    assert (dict(vars(SymNode)), dict(vars(FunctionalTensor))) == before


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() / x.numel() + x.shape[0]


@_REMEMBERS
@taken("memoized_wrappers")
def test_wrappers_leave_no_sums_of_sizes_in_a_trace() -> None:
    """Sizes that the graph uses are in it as before."""
    texts, made = [], []
    for setting in ("-memoized_sizes", "on"):
        plain = proxy_tensor._sym_register
        with (
            mock.patch.dict("os.environ", {"FXDP_SHORTCUTS": setting}),
            mock.patch.object(proxy_tensor, "_sym_register", side_effect=plain) as registered,
            mock.patch.object(cached_joint, "_key", return_value=None),  # traced anew
            mock.patch.object(
                predicted_forward, "_predict", return_value=None
            ),  # with a run of the forward before
        ):
            texts.append(fxdp.plan(Scaled(4, 3), (torch.ones(6, 4),)).text)
        made.append(registered.call_count)
    assert texts[0] == texts[1]
    assert made[1] < made[0] / 2
