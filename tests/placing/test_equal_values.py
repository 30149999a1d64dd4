"""Which nodes are equal whatever the inputs are."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxdp.rules  # noqa: F401 - the ops that draw
from fxdp.placing.equal_values import EqualValues


def equal_values(first: fx.Node, second: fx.Node) -> bool:
    equal = EqualValues()
    return equal.first(first) is equal.first(second)


def _traced(function: object, *inputs: Tensor) -> tuple[fx.Node, fx.Node]:
    gm = make_fx(function)(*inputs)  # type: ignore[arg-type]
    first, second = gm.graph.output_node().args[0]
    return first, second


def test_what_is_computed_twice_is_equal() -> None:
    y = torch.arange(6)
    assert equal_values(*_traced(lambda y: ((y[1:] != -1)[:, None], (y[1:] != -1)[:, None]), y))
    assert equal_values(*_traced(lambda y: (torch.cat([y + 1, y]), torch.cat([y + 1, y])), y))


def test_other_ops_arguments_operands_and_draws_are_not() -> None:
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    assert not equal_values(*_traced(lambda x, y: (x > 0, x >= 0), x, y))
    assert not equal_values(*_traced(lambda x, y: (x > 0, x > 1), x, y))
    assert not equal_values(*_traced(lambda x, y: (x * 1, x * 1.0), x, y))
    assert not equal_values(*_traced(lambda x, y: (x > 0, y > 0), x, y))
    assert not equal_values(*_traced(lambda x, y: (x - y, y - x), x, y))
    assert not equal_values(*_traced(lambda x, y: (x.sum([0, 1]), x.sum([0])), x, y))
    assert not equal_values(*_traced(lambda x, y: (torch.rand_like(x) > 0.5, torch.rand_like(x) > 0.5), x, y))


def test_an_op_of_a_users_own_may_have_a_state() -> None:
    with torch.library._scoped_library("fxdp_tests", "FRAGMENT") as library:
        library.define("stateful(Tensor x) -> Tensor")
        library.impl("stateful", lambda x: x + 1, "CompositeExplicitAutograd")
        op = torch.ops.fxdp_tests.stateful.default
        assert not equal_values(*_traced(lambda x: (op(x), op(x)), torch.rand(3)))
