"""Cached traces of ops: an op that was traced before on similar values is copied node by node.

    %x_1 = gelu(%x)     run under the trace: decomposed, its shapes computed   erf, mul, add, mul
    %y_1 = gelu(%y)     %y is of the same shape, strides and dtype as %x       the same four nodes for %y

A trace with decompositions spends most time on decomposing each op and computing shapes. Repeated layers
repeat the same decompositions.

Values that differ only in storage offset share a trace, and so do slices of equal length. Otherwise each
weight in an all-gathered bucket would have a trace of its own, and so would each op that uses the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxdp.torch_compat.execution import unheard
from fxdp.torch_compat.fake_values import in_other_memory, storage_id
from fxdp.torch_compat.shortcuts import is_on
from fxdp.torch_compat.torch_ops import aten

__all__ = ["OpTraces"]

_LIBRARIES = frozenset({"aten", "prims"})
_SLICE = aten.slice.Tensor


class _OtherKindError(Exception):
    """Raised if a trace has no cache key, or cannot be copied."""


@dataclass(frozen=True)
class _Trace:
    """The recorded trace of an op on example operands."""

    given: tuple[fx.Node, ...]
    operands: tuple[Tensor, ...]
    """The values of the nodes in `given`."""
    made: tuple[fx.Node, ...]
    results: Any
    """The results in the structure that the op returned, with a node in place of each tensor."""

    def fits(self, operands: Sequence[Tensor]) -> bool:
        """Return whether the trace can be copied for operands with different storage offsets."""
        pairs = zip(operands, self.operands, strict=True)
        if all(here.storage_offset() == there.storage_offset() for here, there in pairs):
            return True
        return not any("as_strided" in str(node.target) for node in self.made)  # counts from memory's start


class OpTraces:
    """Cache of the ops in one trace by `make_fx`.

    The caller runs random ops and ops that read or change data without this cache.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Trace | None] = {}
        self._is_on = is_on("op_traces")

    def call(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the op's results under the trace, by running the op or by copying a cached trace."""
        if not self._is_on or not isinstance(target, OpOverload):
            return target(*args, **kwargs)
        if target.namespace not in _LIBRARIES or _writes(target):
            return target(*args, **kwargs)
        operands: list[Tensor] = []
        try:
            with unheard():  # a trace intercepts each access to a tensor
                asked = _from_zero(args) if target is _SLICE else tuple(args)
                key = target, _kind(asked, operands), _kind(dict(kwargs), operands), _begins(operands)
                given = [_node(operand) for operand in operands]
                known = self._known.get(key)
                if known is not None and known.fits(operands):
                    return _copied(known, operands, given, args if target is _SLICE else ())
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


def _from_zero(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a slice, moved to the start of the dim if plain and in range."""
    if not _is_within(args):
        return tuple(args)
    value, dim, start, end = args
    return value, dim, 0, end - start, "within"


def _is_within(args: Sequence[Any]) -> bool:
    """Return whether a slice of plain integers stays within the value."""
    if len(args) != 4 or not all(type(number) is int for number in args[1:]):
        return False
    value, dim, start, end = args
    return type(value.shape[dim]) is int and 0 <= start < end <= value.shape[dim]


def _begins(operands: Sequence[Tensor]) -> Hashable:
    """Return a key of the storage offsets of values that share memory or have a symbolic offset."""
    if len(operands) == 1 and type(operands[0].storage_offset()) is int:
        return None
    memory = [storage_id(value) for value in operands]
    return tuple(
        (memory.index(one), _size(value.storage_offset()))
        for one, value in zip(memory, operands, strict=True)
        if memory.count(one) > 1 or type(value.storage_offset()) is not int
    )


def _kind(value: Any, operands: list[Tensor]) -> Hashable:
    """Return a key for a value: all properties that a trace may depend on.

    Tensors are appended to `operands`, once each, and numbered by index.
    """
    if isinstance(value, FakeTensor):
        if value.dtype.is_complex or value.layout != torch.strided:
            raise _OtherKindError
        number = next((i for i, known in enumerate(operands) if known is value), len(operands))
        if number == len(operands):
            operands.append(value)
        lies = (*map(_size, value.shape), None, *map(_size, value.stride()))
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
        return type(value), repr(value)  # repr distinguishes -0.0 from 0.0
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
    """Return the node of a value; a constant is refused, because torch computes with the constant's value."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    spec: Any = get_proxy_slot(value, _tracer(), None)
    if spec is None or spec.constant is not None:
        raise _OtherKindError
    node: fx.Node = spec.proxy.node
    return node


def _nodes_so_far() -> Callable[[], Iterator[fx.Node]]:
    """Return a function that yields the nodes added to the trace since this call."""
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
    """Record the traced nodes; fail if a node reads a tensor of the trace that is not an operand."""
    own = {*given, *nodes}
    for node in nodes:
        others = (n.meta.get("val") for n in node.all_input_nodes if n not in own)
        if node.op != "call_function" or any(isinstance(value, (Tensor, list, tuple)) for value in others):
            raise _OtherKindError
        if "unbacked_bindings" in node.meta:  # rows that a mask selects: they differ per call
            raise _OtherKindError
    where = {id(operand): node for operand, node in zip(operands, given, strict=True)}
    return _Trace(tuple(given), tuple(operands), tuple(nodes), _as_nodes(results, own, where))


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


def _copied(known: _Trace, operands: Sequence[Tensor], given: Sequence[fx.Node], cut: Sequence[Any]) -> Any:
    """Copy a cached trace for new operands; `cut` holds the arguments of a slice, empty for all other ops."""
    from torch.fx.experimental.proxy_tensor import track_tensor

    tracer = _tracer()
    copies = dict(zip(known.given, given, strict=True))
    values: dict[fx.Node, Any] = dict(zip(known.given, operands, strict=True))
    before: dict[fx.Node, Any] = dict(zip(known.given, known.operands, strict=True))
    for node in known.made:
        read = [(before[n], values[n]) for n in node.all_input_nodes if n in before]
        before[node] = node.meta.get("val")
        copy = copies[node] = tracer.graph.node_copy(node, lambda n: copies.get(n, n))
        further = 0
        if _is_within(cut):
            further = (cut[2] - node.args[2]) * operands[0].stride(cut[1])
            copy.args = (*copy.args[:2], *cut[2:])
        copy.meta["val"] = values[node] = in_other_memory(before[node], read, further)

    def result(node: Any) -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)([result(one) for one in node])
        if node is None:
            return None
        value = values[node]
        if node not in known.given:
            track_tensor(value, fx.Proxy(copies[node], tracer), constant=None, tracer=tracer)
        return value

    return result(known.results)
