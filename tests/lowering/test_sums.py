"""Results of a backward that go into buffers: products while they are computed, all else by an addition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxdp.lowering.sums import add_to_buffers
from fxdp.torch_compat import compile_with_inductor, static_mode

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
aten = torch.ops.aten


def _backward(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    weight = aten.t.default(aten.t.default(aten.mm.default(aten.t.default(g), x)))
    flipped = aten.t.default(aten.mm.default(aten.t.default(x), g))
    shared = aten.mm.default(aten.t.default(x), x)
    bias = aten.sum.dim_IntList(g, [0])
    return aten.neg.default(g), weight, flipped, shared, bias, aten.exp.default(shared), g


def test_sums_are_those_of_the_results() -> None:
    gm = fx.symbolic_trace(_backward)
    summed = (1, 2, 3, 4, 6)
    changed = add_to_buffers(gm, summed)
    x, g = torch.randn(5, 3), torch.randn(5, 2)
    wanted = gm(x, g)
    buffers = [torch.ones_like(wanted[i]).contiguous() for i in summed]
    for times in (1.0, 2.0):
        rest = changed(x, g, *buffers)
        assert all(map(torch.equal, rest, (wanted[0], wanted[5])))
        for number, buffer in zip(summed, buffers, strict=True):
            torch.testing.assert_close(buffer, 1 + times * wanted[number])


def test_a_product_is_never_stored_unless_something_reads_it() -> None:
    changed = add_to_buffers(fx.symbolic_trace(_backward), (1, 2, 3, 4, 6))
    into = [n.target for n in changed.graph.nodes if n.target in (aten.addmm_.default, aten.add_.Tensor)]
    # the gradient of a weight is fused; one seen transposed, or read by another op, is added
    assert sorted(map(str, into)) == ["aten.add_.Tensor"] * 4 + ["aten.addmm_.default"]
    assert sum(n.target is aten.mm.default for n in changed.graph.nodes) == 2


def test_one_product_can_be_several_results() -> None:
    def backward(x: Tensor) -> tuple[Tensor, ...]:
        product = aten.mm.default(x, x)
        return product, product, aten.t.default(aten.t.default(product))

    x = torch.randn(3, 3)
    changed = add_to_buffers(fx.symbolic_trace(backward), (0, 2))
    buffers = [torch.zeros(3, 3), torch.zeros(3, 3)]
    rest = changed(x, *buffers)
    for found in (*rest, *buffers):
        torch.testing.assert_close(found, x @ x)


def test_a_constant_needs_no_other_input() -> None:
    changed = add_to_buffers(fx.symbolic_trace(lambda: (aten.ones.default([2]),)), (0,))
    buffer = torch.ones(2)
    assert changed(buffer) == ()
    assert buffer.tolist() == [2, 2]


def test_inductor_calls_the_kernel_that_adds_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment says `CI`, which makes Inductor refuse ops that it has not met."""
    monkeypatch.setenv("CI", "true")

    def backward(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return aten.neg.default(g), aten.mm.default(aten.permute.default(g, [1, 0]), x)

    x, g, buffer = torch.randn(5, 3), torch.randn(5, 2), torch.ones(2, 3)
    changed = add_to_buffers(fx.symbolic_trace(backward), (1,))
    with static_mode() as fake_mode:
        examples = [fake_mode.from_tensor(value) for value in (x, g, buffer)]
        FakeTensorProp(changed, fake_mode).propagate_dont_convert_inputs(*examples)
    run, _ = compile_with_inductor(changed, examples, fake_mode, backward=True, inference=False, fixed=0)
    (rest,) = run([x, g, buffer])
    torch.testing.assert_close(rest, -g)
    torch.testing.assert_close(buffer, 1 + g.T @ x)
