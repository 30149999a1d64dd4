"""Costs against torch's own count on eager runs, and against the graph of a transformer layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fxdp.ir.graph.metadata import meta, value_bytes
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.cut.cost import _FLOPS_PER_BYTE, node_bytes, node_cost, node_flops
from tests.capturing import capture
from tests.graphs import Sketch

aten = torch.ops.aten


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The node of an op on tensors of these types (`f32[2, 3]`), typed by what the op gives on meta."""
    g = Sketch()
    nodes = [g.add(Input(i), a) if isinstance(a, str) else a for i, a in enumerate(args)]
    real = [_meta(a) if isinstance(a, str) else a for a in args]
    node = g.call(op, *nodes)
    node.kwargs = kwargs
    found = op(*real, **kwargs)
    types = [TensorType(t.dtype, tuple(t.shape)) if isinstance(t, Tensor) else None for t in _tuple(found)]
    meta(node).type = tuple(types) if isinstance(found, tuple) else types[0]
    return node


def _meta(text: str) -> Tensor:
    dtype, sizes = text[:-1].split("[")
    chosen = {"f32": torch.float32, "i64": torch.int64, "bf16": torch.bfloat16}[dtype]
    return torch.empty([int(n) for n in sizes.split(",") if n.strip()], dtype=chosen, device="meta")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(
    ("op", "args", "flops"),
    [
        (aten.mm.default, ("f32[3, 5]", "f32[5, 7]"), 2 * 3 * 5 * 7),
        (aten.addmm.default, ("f32[7]", "f32[3, 5]", "f32[5, 7]"), 2 * 3 * 5 * 7),
        (aten.bmm.default, ("f32[2, 3, 5]", "f32[2, 5, 7]"), 2 * 2 * 3 * 5 * 7),
        (aten.baddbmm.default, ("f32[2, 3, 7]", "f32[2, 3, 5]", "f32[2, 5, 7]"), 2 * 2 * 3 * 5 * 7),
        (aten.addbmm.default, ("f32[3, 7]", "f32[2, 3, 5]", "f32[2, 5, 7]"), 2 * 2 * 3 * 5 * 7),
        (aten.mv.default, ("f32[3, 5]", "f32[5]"), 2 * 3 * 5),
        (aten.dot.default, ("f32[5]", "f32[5]"), 2 * 5),
        (aten.add.Tensor, ("f32[3, 5]", "f32[3, 5]"), 0),
        (aten.relu.default, ("f32[3, 5]",), 0),
    ],
)
def test_products(op: Any, args: tuple[str, ...], flops: int) -> None:
    assert node_flops(call(op, *args)) == flops


def test_convolutions() -> None:
    """With groups, stride and padding; transposed; backward with and without the input's gradient."""
    x, weight = "f32[2, 6, 9, 9]", "f32[4, 3, 3, 3]"
    plain = ([2, 2], [1, 1], [1, 1], False, [0, 0], 2)
    assert node_flops(call(aten.convolution.default, x, weight, None, *plain)) == 2 * (2 * 4 * 5 * 5) * 27
    grad = "f32[2, 4, 5, 5]"
    for mask, times in (([True, True, False], 2), ([False, True, False], 1), ([False, False, True], 0)):
        node = call(aten.convolution_backward.default, grad, x, weight, [4], *plain, mask)
        assert node_flops(node) == times * 2 * (2 * 4 * 5 * 5) * 27
    turned = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    node = call(aten.convolution.default, x, "f32[6, 5, 3, 3]", None, *turned)
    assert node_flops(node) == 2 * (2 * 6 * 9 * 9) * (5 * 3 * 3)


def test_attention() -> None:
    """4 query heads on 2 key heads, 5 queries, 7 keys."""
    q, k, v = "f32[2, 4, 5, 8]", "f32[2, 2, 7, 8]", "f32[2, 2, 7, 8]"
    flops = 2 * (2 * 4) * 5 * 7 * (8 + 8)
    g = Sketch()
    nodes = [g.add(Input(i), t) for i, t in enumerate((q, k, v))]
    forward = g.call(aten._scaled_dot_product_flash_attention_for_cpu.default, *nodes)
    assert node_flops(forward) == flops
    grad = g.add(Input(3), "f32[2, 4, 5, 8]")
    backward = g.call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad, *nodes)
    assert node_flops(backward) == flops * 5 // 2
    by_position = [g.add(Input(4 + i), t) for i, t in enumerate(("f32[2, 5, 4, 8]", "f32[2, 7, 4, 8]"))]
    node = g.call(aten._flash_attention_forward.default, *by_position, by_position[1])
    assert node_flops(node) == flops


def test_recurrent_layers() -> None:
    g = Sketch()
    x, wide, square, bias = (
        g.add(Input(i), t) for i, t in enumerate(("f32[9, 3, 4]", "f32[20, 4]", "f32[20, 5]", "f32[20]"))
    )
    assert node_flops(g.call(aten.mkldnn_rnn_layer.default, x, wide, square, bias, bias)) == 2 * 27 * 20 * 9
    backward = g.call(aten.mkldnn_rnn_layer_backward.default, x, wide, square, bias, bias)
    assert node_flops(backward) == 4 * 27 * 20 * 9
    assert node_flops(g.call(aten._cudnn_rnn.default, x, [wide, square, bias])) == 2 * 27 * 20 * 9


@pytest.mark.parametrize(
    ("op", "args", "bytes_"),
    [
        (aten.add.Tensor, ("f32[3, 5]", "f32[5]"), 4 * (15 + 5 + 15)),
        (aten.sum.dim_IntList, ("bf16[3, 5]", [0]), 2 * (15 + 5)),
        (aten.var_mean.correction, ("f32[3, 5]", [0]), 4 * (15 + 5 + 5)),
        (aten.embedding.default, ("f32[1000, 8]", "i64[3]"), 2 * 4 * 24 + 8 * 3),
        (aten.index.Tensor, ("f32[1000, 8]", []), 2 * 4 * 8000),
        (aten.zeros_like.default, ("f32[3, 5]",), 4 * 15),
        (aten.new_zeros.default, ("f32[3, 5]", [7]), 4 * 7),
        (aten.view.default, ("f32[3, 5]", [15]), 0),
        (aten.t.default, ("f32[3, 5]",), 0),
        (aten.split.Tensor, ("f32[3, 5]", 2), 0),
        (aten.expand.default, ("f32[1, 5]", [9, 5]), 0),
        (aten._unsafe_view.default, ("f32[3, 5]", [15]), 0),
    ],
)
def test_traffic(op: Any, args: tuple[Any, ...], bytes_: int) -> None:
    if op is aten.index.Tensor:
        g = Sketch()
        node = g.call(op, g.add(Input(0), "f32[1000, 8]"), [], type="f32[1000, 8]")
    else:
        node = call(op, *args)
    assert node_bytes(node) == bytes_


def test_a_value_that_is_read_twice_counts_once() -> None:
    g = Sketch()
    x = g.add(Input(0), "f32[B, 3]")
    assert node_bytes(g.call(aten.mul.Tensor, x, x, type="f32[B, 3]"), batch=10) == 4 * 60
    assert node_flops(g.call(aten.mm.default, x, x, type="f32[B, B]"), batch=10) == 2 * 10 * 3 * 3


def test_the_slower_of_work_and_traffic() -> None:
    wide = call(aten.mm.default, "f32[512, 512]", "f32[512, 512]")
    assert node_cost(wide) == node_flops(wide) == 2 * 512**3
    thin = call(aten.mm.default, "f32[1, 512]", "f32[512, 512]")
    assert node_cost(thin) == node_bytes(thin) * _FLOPS_PER_BYTE > node_flops(thin)
    assert node_cost(thin, flops_per_byte=0.1) == node_flops(thin)


def test_inputs_sizes_and_what_is_no_op_cost_nothing() -> None:
    g = Sketch()
    x = g.add(Input(0), "f32[B, 3]")
    size = g.call(aten.sym_size.int, x, 0, type="int(B)")
    assert [node_cost(n) for n in (x, size, g.call(getattr, x, "shape"))] == [0, 0, 0]
    assert value_bytes(x, batch=5) == 60


class Layer(nn.Module):
    """A transformer layer and a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return (x + self.down(torch.relu(self.up(self.other(x))))).sum()


def test_a_layer_forward_and_backward() -> None:
    """All operations of the joint graph are those that torch counts when the layer runs."""
    layer, x = Layer(64), torch.randn(4, 16, 64)
    nodes = list(capture(layer, (x,), {}).gm.graph.nodes)
    with FlopCounterMode(display=False) as counter:
        layer(x).backward()
    forward = sum(node_flops(n, batch=4) for n in nodes if not meta(n).backward)
    backward = sum(node_flops(n, batch=4) for n in nodes if meta(n).backward)
    rows, attention = 4 * 16, 2 * 4 * 2 * 16 * 16 * 64
    assert forward == 2 * rows * 64 * 64 * (3 + 3 + 1 + 4 + 4) + attention
    assert forward + backward == counter.get_total_flops() + _uncounted(counter, attention)
    assert backward == 2 * rows * 64 * 64 * (3 + 2 * (3 + 1 + 4 + 4)) + attention * 5 // 2
    share = sum(node_cost(n, batch=4) - node_flops(n, batch=4) for n in nodes)
    assert 0 < share < sum(node_cost(n, batch=4) for n in nodes)


def _uncounted(counter: FlopCounterMode, attention: int) -> int:
    """torch has no count for attention on CPU, forward and backward."""
    counted = any("dot_product" in str(op) for op in counter.get_flop_counts()["Global"])
    return 0 if counted else attention + attention * 5 // 2
