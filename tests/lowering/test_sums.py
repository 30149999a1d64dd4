"""Results of a backward that go into buffers: products while they are computed, all else by an addition."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxdp.lowering.sums import add_to_buffers

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
