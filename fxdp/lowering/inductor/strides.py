"""The strides of values that Inductor chooses, or that forward, backward and user agree on.

On CPU, Inductor runs every convolution in channels-last format. A forward traced with this format from the
start has the strides that Inductor would choose. So the strides of saved values are known before the forward
is compiled, and ranks can compile forward and backward at the same time. On other devices, Inductor decides
by heuristics, and the backward has to wait for the strides of the forward.

Forward and backward are compiled for the traced strides of results. Inductor keeps the strides of a result
with memory of its own, but not always of a view: a value that is concatenated later may be computed inside of
the concatenation's buffer at once.

    %kept = permute(%x)                 traced [6, 8, 2] with strides (16, 1, 8)
    %all = cat([%x, ..], 2)             %x is a part of %all: %kept has (112, 1, 8)

If only a view of a value is read, Inductor computes only the view:

    %entire = exp(%x)                    traced [6, 8] with strides (8, 1)
    %kept = %entire[:, :2]               traced [6, 2] with strides (8, 1), computed alone with (2, 1)

Such results are copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.types.sizes import number
from fxdp.torch_compat import aten, graph_module

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_ANY_NUMBER = 97


def traces_channels_last(device: torch.device) -> bool:
    """Return whether Inductor runs all convolutions channels-last on this device."""
    if device.type != "cpu":
        return False
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[no-untyped-call]


def channels_last(image: Tensor) -> Tensor:
    """Return an image in the memory format of Inductor's convolutions; unchanged if in this format."""
    layout = _FORMATS.get(image.dim())
    return image if layout is None else image.contiguous(memory_format=layout)


def of_that_shape(weight: Tensor) -> Tensor:
    """Return a weight's memory viewed with channels-last shape and strides; element values are arbitrary.

    For a convolution's backward that computes only the weight gradient, and so reads no weights. Converting
    the weights would copy them.
    """
    if weight.dim() not in _FORMATS or not weight.is_contiguous():
        return weight
    outer, inner, *kernel = weight.shape
    turned = weight.view(outer, *kernel, inner)
    return turned.permute(0, -1, *range(1, turned.dim() - 1))


def chooses_layouts(joint: fx.GraphModule, device: torch.device) -> bool:
    """Return whether Inductor may change memory formats from the traced ones, because of convolutions."""
    if traces_channels_last(device):
        return False
    return any(n.target is aten.convolution.default for n in joint.graph.nodes)


def results(gm: fx.GraphModule) -> list[Any]:
    """Return the flat results of a traced graph."""
    values = gm.graph.output_node().args[0]
    assert isinstance(values, (list, tuple))
    return list(values)


def moved(gm: fx.GraphModule, strides: Sequence[Any], among: Collection[int]) -> list[int]:
    """Return the results among `among` whose strides differ from the traced strides.

    `strides` are the strides of the compiled code's results, None where unknown.
    """
    values = results(gm)
    known = [i for i in among if i < len(strides) and strides[i] is not None]
    return [i for i in known if _differs(values[i], strides[i])]


def _differs(node: Any, stride: Sequence[int]) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or 0 in map(_hint, value.shape):
        return False
    rows = zip(value.shape, value.stride(), stride, strict=True)
    return any(_hint(size) != 1 and _hint(traced) != _hint(found) for size, traced, found in rows)


def _hint(size: Any) -> Any:
    """Return a typical value of a size, by which sizes and strides that differ can be told apart."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint  # None: the number of rows that values select
    return number(size.node.expr, {}, unknown=_ANY_NUMBER) if hint is None else hint


def copied(gm: fx.GraphModule, which: Collection[int] = ()) -> fx.GraphModule:
    """Return a copy of a graph, in which the results numbered `which` have memory of their own."""
    graph = fx.Graph()
    values = graph.graph_copy(gm.graph, {})
    assert isinstance(values, (list, tuple))
    made = {node: _with_own_memory(graph, node) for node in {values[i] for i in which}}
    graph.output(tuple(made.get(v, v) if i in which else v for i, v in enumerate(values)))
    return graph_module(gm, graph)


def _with_own_memory(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy a value into new memory with the traced strides."""
    value: Tensor = node.meta["val"]
    order = sorted(range(value.dim()), key=lambda d: -_hint(value.stride(d)))
    return _dense(graph, node, order) if _is_dense(value, order) else _spaced(graph, node)


def _is_dense(value: Tensor, order: Sequence[int]) -> bool:
    """Return whether elements, with dims in this order, have no gaps; a part of a larger value has gaps."""
    step: Any = 1
    for d in reversed(order):
        if _hint(value.shape[d]) != 1 and _hint(value.stride(d)) != _hint(step):
            return False
        step = step * value.shape[d]
    return True


def _dense(graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
    back = [order.index(d) for d in range(len(order))]
    made, found = node, node.meta["val"]
    steps = (
        (aten.permute.default, (order,)),
        (aten.lift_fresh_copy.default, ()),
        (aten.permute.default, (back,)),
    )
    for target, args in steps:  # Inductor removes a clone, but not a lift_fresh_copy
        made, found = graph.call_function(target, (made, *args)), target(found, *args)
        made.meta["val"] = found
    return made


def _spaced(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy a value with the gaps of the traced strides, as a part of a larger value that does not exist."""
    value: Tensor = node.meta["val"]
    size = [_number(graph, aten.sym_size.int, node, d) for d in range(value.dim())]
    stride = [_number(graph, aten.sym_stride.int, node, d) for d in range(value.dim())]
    room: Any = 1
    for n, step in zip(size, stride, strict=True):
        last = _number(graph, operator.mul, _number(graph, operator.sub, n, 1), step)
        room = _number(graph, operator.add, room, last)
    how: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    empty = graph.call_function(aten.full.default, ([room], 0), how)
    filled = graph.call_function(aten.as_strided_scatter.default, (empty, node, size, stride, 0))
    empty.meta["val"] = filled.meta["val"] = full = aten.new_zeros.default(value, [_value(room)])
    made = graph.call_function(aten.as_strided.default, (filled, size, stride, 0))
    made.meta["val"] = full.as_strided(value.shape, value.stride(), 0)
    return made


def _number(graph: fx.Graph, op: Callable[..., Any], *args: Any) -> Any:
    """Return the result of an op on sizes; if symbolic, as a node: Inductor takes no symbol as argument."""
    found = op(*map(_value, args))
    if not isinstance(found, torch.SymInt):
        return found
    made = graph.call_function(op, args)
    made.meta["val"] = found
    return made


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
