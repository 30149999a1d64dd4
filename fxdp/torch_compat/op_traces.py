"""Traces of ops that were traced before, on other values of the same kind: copied, node by node.

    %x_1 = gelu(%x)     run under the trace: decomposed, its shapes computed   erf, mul, add, mul
    %y_1 = gelu(%y)     %y is of the same shape, strides and dtype as %x       the same four nodes for %y

Of a trace with decompositions most of the time goes into finding out, op by op, what it becomes and which
shapes follow. Layers ask the same again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor,
)

__all__ = ["OpTraces"]

_LIBRARIES = frozenset({"aten", "prims"})
_Memory: TypeAlias = "tuple[fx.Node, int]"
"""In whose memory a value lies: a node of those before it, and which of its tensors."""


class _OtherKindError(Exception):
    """What cannot be said, or not be copied."""


@dataclass(frozen=True)
class _Lies:
    """How a tensor lies in memory."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    memory: _Memory | None
    """None for memory of its own."""

    @staticmethod
    def of(value: Tensor, memory: _Memory | None) -> _Lies:
        where = value.storage_offset()
        return _Lies(tuple(value.shape), value.stride(), where, value.dtype, value.device, memory)


@dataclass(frozen=True)
class _Made:
    """A node of a trace, and how its tensors lie: its value, with these in their places."""

    node: fx.Node
    value: Any


@dataclass(frozen=True)
class _Trace:
    """What an op became on some values."""

    operands: tuple[fx.Node, ...]
    made: tuple[_Made, ...]
    results: Any
    """As the op gave them, a node in the place of each tensor."""


class OpTraces:
    """The ops of one trace by `make_fx`. Draws, and what reads or changes data, are for the caller to run."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Trace | None] = {}

    def call(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The op's results under the trace, run or copied."""
        if not isinstance(target, OpOverload) or target.namespace not in _LIBRARIES or _writes(target):
            return target(*args, **kwargs)
        operands: list[Tensor] = []
        try:
            with torch._C.DisableTorchFunction():  # a trace listens to each question about a tensor
                key = target, _kind(tuple(args), operands), _kind(dict(kwargs), operands)
                given = [_node(operand) for operand in operands]
                known = self._known.get(key)
                if known is not None:
                    return _copied(known, operands, given)
        except _OtherKindError:
            return target(*args, **kwargs)
        if key in self._known:
            return target(*args, **kwargs)
        nodes = _nodes_so_far()
        made = target(*args, **kwargs)
        try:
            self._known[key] = _recorded(list(nodes()), operands, given, made)
        except _OtherKindError:
            self._known[key] = None
        return made


def _writes(target: OpOverload) -> bool:
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _kind(value: Any, operands: list[Tensor]) -> Hashable:
    """What a trace may depend on; tensors are added to `operands`, one that is there already is that one."""
    if isinstance(value, FakeTensor):
        if value.dtype.is_complex or value.layout != torch.strided:
            raise _OtherKindError
        number = next((i for i, known in enumerate(operands) if known is value), len(operands))
        if number == len(operands):
            operands.append(value)
        lies = (*map(_size, value.shape), None, *map(_size, value.stride()), _size(value.storage_offset()))
        return number, value.dtype, value.device, lies
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_kind(one, operands) for one in value)
    if isinstance(value, dict):
        return tuple((name, _kind(one, operands)) for name, one in sorted(value.items()))
    if isinstance(value, torch.SymInt):
        return _size(value)
    if value is None or isinstance(
        value, (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return type(value), repr(value)  # -0.0 is not 0.0
    raise _OtherKindError


def _size(size: Any) -> Hashable:
    found: Hashable = size.node.expr if isinstance(size, torch.SymInt) else size
    return found


def _tracer() -> Any:
    mode = get_proxy_mode()
    if mode is None:
        raise _OtherKindError
    return mode.tracer


def _node(value: Tensor) -> fx.Node:
    """The node of a value; a constant, which torch computes with, is left to it."""
    slot: Any = get_proxy_slot(value, _tracer(), None)
    if slot is None or slot.constant is not None:
        raise _OtherKindError
    node: fx.Node = slot.proxy.node
    return node


def _nodes_so_far() -> Callable[[], Iterator[fx.Node]]:
    """Later asked, gives the nodes that were added to the trace since."""
    graph = _tracer().graph
    last = graph._root._prev

    def since() -> Iterator[fx.Node]:
        node = last._next
        while node is not graph._root:
            yield node
            node = node._next

    return since


def _recorded(
    nodes: Sequence[fx.Node], operands: Sequence[Tensor], given: Sequence[fx.Node], results: Any
) -> _Trace:
    """What was traced, if nothing else of the trace's tensors is in it."""
    own = {*given, *nodes}
    memory = {_storage(operand): (node, 0) for operand, node in zip(operands, given, strict=True)}
    made = []
    for node in nodes:
        others = (n.meta.get("val") for n in node.all_input_nodes if n not in own)
        if node.op != "call_function" or any(isinstance(value, (Tensor, list, tuple)) for value in others):
            raise _OtherKindError
        value = node.meta.get("val")
        made.append(_Made(node, _each(value, lambda tensor: _Lies.of(tensor, memory.get(_storage(tensor))))))
        for i, tensor in enumerate(_tensors(value)):
            memory.setdefault(_storage(tensor), (node, i))
    where = {id(operand): node for operand, node in zip(operands, given, strict=True)}
    return _Trace(tuple(given), tuple(made), _as_nodes(results, own, where))


def _as_nodes(results: Any, own: set[fx.Node], operands: Mapping[int, fx.Node]) -> Any:
    if results is None:
        return None
    if isinstance(results, (list, tuple)):
        return type(results)([_as_nodes(one, own, operands) for one in results])
    if not isinstance(results, FakeTensor):
        raise _OtherKindError
    node = operands.get(id(results)) or _node(results)
    if node not in own:
        raise _OtherKindError
    return node


def _copied(known: _Trace, operands: Sequence[Tensor], given: Sequence[fx.Node]) -> Any:
    """The same nodes again, on these operands."""
    tracer = _tracer()
    copies = dict(zip(known.operands, given, strict=True))
    values: dict[fx.Node, Any] = dict(zip(known.operands, operands, strict=True))
    with disable_proxy_modes_tracing():
        for one in known.made:
            values[one.node] = _each(one.value, lambda lies: _like(lies, values))
    for one in known.made:
        copy = copies[one.node] = tracer.graph.node_copy(one.node, lambda n: copies.get(n, n))
        copy.meta["val"] = values[one.node]

    def result(node: Any) -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)([result(one) for one in node])
        if node is None:
            return None
        value = values[node]
        if node not in known.operands:
            track_tensor(value, fx.Proxy(copies[node], tracer), constant=None, tracer=tracer)
        return value

    return result(known.results)


def _like(lies: _Lies, values: Mapping[fx.Node, Any]) -> Tensor:
    """A tensor that lies so, in memory of its own or in that of what it is a view of."""
    if lies.memory is None:
        return torch.empty_strided(lies.shape, lies.stride, dtype=lies.dtype, device=lies.device)
    node, place = lies.memory
    return torch.as_strided(list(_tensors(values[node]))[place], lies.shape, lies.stride, lies.offset)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with its tensors, or what stands for them, changed."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(one, change) for one in value])
    return change(value) if isinstance(value, (Tensor, _Lies)) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
