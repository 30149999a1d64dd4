"""A backward in two halves computes what the entire one does, and nothing twice.

Results of a backward that go into buffers: products while they are computed, all else by an addition.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxdp.lowering.backward import add_to_buffers, split_backward
from fxdp.torch_compat import compile_with_inductor, sizes_behind, static_mode, symbolic_sizes

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
aten = torch.ops.aten


def _of_layers(x: Tensor, weight: Tensor, scale: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
    """Of `layer_norm(conv(x, weight)) * scale`-like ops: gradients of x, weight, bias, scale."""
    normed, mean, rstd = aten.native_layer_norm(x, [4], scale, None, 1e-5)
    inner, of_scale, _ = aten.native_layer_norm_backward(
        tangent, x, [4], mean, rstd, scale, None, [True, True, False]
    )
    of_x, of_weight, of_bias = aten.convolution_backward(
        inner, normed, weight, [3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    )
    return of_x, of_weight, of_bias, of_scale


def test_two_halves() -> None:
    torch.manual_seed(0)
    shapes = ((2, 3, 4, 4), (3, 3, 3, 3), (4,), (2, 3, 4, 4))
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    full = make_fx(_of_layers)(*values)
    inputs, weights = split_backward(full, (0,))

    def calls(gm: torch.fx.GraphModule) -> list[str]:
        return [str(n.target) for n in gm.graph.nodes if "backward" in str(n.target)]

    of_x, *handed = inputs(*values)
    wanted = full(*values)
    assert all(isinstance(value, Tensor) for value in handed)
    torch.testing.assert_close((of_x, *weights(*handed)), wanted, rtol=1e-12, atol=1e-12)
    # layer norm's gives both at once; a convolution's is split
    assert calls(inputs) == ["aten.native_layer_norm_backward.default", "aten.convolution_backward.default"]
    assert calls(weights) == ["aten.convolution_backward.default"]
    masks = [n.args[-1] for gm in (inputs, weights) for n in gm.graph.nodes if "conv" in str(n.target)]
    assert masks == [[True, False, False], [False, True, True]]


def test_the_second_half_knows_of_what_its_sizes_are_made() -> None:
    """Only the first half reads the batch itself; the second one reads three times the batch."""
    mode, sizes = symbolic_sizes({"B": 8, "b": 4, "offset": 2})
    graph = fx.Graph()
    batch, part, offset, product, x = map(graph.placeholder, ("batch", "part", "offset", "product", "x"))
    for node, size in zip((batch, part, offset), sizes.values(), strict=True):
        node.meta["val"] = size
    product.meta["val"] = 3 * sizes["B"]
    with mode:
        x.meta["val"] = torch.empty(2 * sizes["offset"], 5)
    assert sizes_behind([product, x], [batch, part, offset]) == [batch, offset]
    first = graph.call_function(operator.mul, (x, batch))
    second = graph.call_function(operator.mul, (x, product))
    first.meta["val"] = second.meta["val"] = x.meta["val"]
    graph.output((first, second))
    _, weights = split_backward(fx.GraphModule({}, graph), (0,))
    assert [n.name for n in weights.graph.find_nodes(op="placeholder")] == ["product", "x", "batch", "offset"]


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
