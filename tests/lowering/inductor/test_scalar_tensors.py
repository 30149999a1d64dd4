"""A number beside a float64 tensor, before it as well as after it."""

from __future__ import annotations

import torch
from torch import fx

from fxdp.lowering.inductor.scalar_tensors import NumberTensors

aten = torch.ops.aten


def test_a_number_comes_first() -> None:
    graph, numbers = fx.Graph(), NumberTensors()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    read = graph.call_function(aten._local_scalar_dense.default, (scale,))
    values = torch.ones(2, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    numbers.keep(read, values[1:], {})

    constant = graph.call_function(aten.add.Tensor, (0.3, x))  # torch.add(0.3, x)
    assert numbers.call(constant, (0.3, values[0])) == (aten.add.Tensor, (0.3, values[0]))
    for args, given in (((read, x), (0.1, values[0])), ((x, read), (values[0], 0.1))):
        node = graph.call_function(aten.mul.Tensor, args)
        target, found = numbers.call(node, given)
        assert target is aten.mul.Tensor
        assert all(isinstance(one, torch.Tensor) for one in found)
