"""A backward in two halves computes what the whole one does, and nothing twice."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxdp.lowering.halving import split_backward
from fxdp.torch_compat import sizes_behind, symbolic_sizes

aten = torch.ops.aten


def _backward(x: Tensor, weight: Tensor, scale: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
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
    whole = make_fx(_backward)(*values)
    inputs, weights = split_backward(whole, (0,))

    def calls(gm: torch.fx.GraphModule) -> list[str]:
        return [str(n.target) for n in gm.graph.nodes if "backward" in str(n.target)]

    of_x, *handed = inputs(*values)
    wanted = whole(*values)
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
