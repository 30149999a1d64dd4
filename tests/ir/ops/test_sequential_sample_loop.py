"""The turns of a loop as one op, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxdp.errors import InputError
from fxdp.ir.ops.sequential_sample_loop import LOOP_OP, described

CODE = (
    "def iteration(x, w): m = torch.ops.aten.gt.Scalar(x, 0); y = torch.ops.aten.index.Tensor(x, [m]); "
    "z = torch.ops.aten.mul.Tensor(y, w); torch.ops.aten.add_.Tensor(z, 1); "
    "return torch.ops.aten.sum.default(torch.ops.aten.sin.default(z))"
)


def _loop(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([(one[one > 0] * w + 1).sin().sum() for one in x])


def test_values_and_gradients_are_those_of_the_loop() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    found, wanted = LOOP_OP([x], [w], CODE, "float64[]"), _loop(x, w)
    assert torch.equal(found, wanted)
    grad = torch.randn(5, dtype=torch.float64)
    pairs = (torch.autograd.grad(value, [x, w], grad, create_graph=True) for value in (found, wanted))
    (of_op, _), (of_loop, _) = both = tuple(pairs)
    torch.testing.assert_close(both[0], both[1])
    assert of_loop.requires_grad
    with pytest.raises(RuntimeError, match="a first derivative only"):
        of_op.sum().backward()


def test_of_no_samples_there_is_nothing() -> None:
    x, w = torch.zeros(0, 6), torch.tensor(1.5, requires_grad=True)
    found = LOOP_OP([x], [w], CODE, described(torch.float32, []))
    assert found.shape == (0,)
    found.sum().backward()
    assert w.grad == 0


def test_a_turn_of_another_shape_is_no_value_for_all() -> None:
    code = "def iteration(x): return torch.ops.aten.index.Tensor(x, [torch.ops.aten.gt.Scalar(x, 0)])"
    x = torch.tensor([[1.0, 2.0, -1.0], [-1.0, 3.0, -1.0]])
    with pytest.raises(InputError, match=r"turn 1 of .* shape \[1\], where .* had \[2\]"):
        LOOP_OP([x], [], code, "float32[2]")
