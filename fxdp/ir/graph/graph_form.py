"""Serialization of graphs without their modules: as exact text, and as bytes from which a graph is restored.

`exact_text`: equal texts are equal programs; a graph with a value that has no exact text (a user's function,
a tensor) raises `NoTextError`. `graph_bytes`, `graph_of_bytes`: nodes with their metadata and memory layouts
of captured values, without the example values.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.ir.graph.metadata import layouts, set_layouts
from fxdp.torch_compat import OpOverload, graph_module

_NAMESPACES = frozenset({"aten", "prims", "fxdp", "_c10d_functional", "c10d_functional"})
"""Namespaces of ops that torch and fxdp versions fix; ops in all further namespaces are the user's."""

_PACKAGES = frozenset({"fxdp", "torch", "_operator", "math"})
"""Packages of functions that nodes may call beside ops: sizes are computed by Python's operators."""
_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format, type(...))  # fmt: skip
_META = ("fxdp", "seq_nr", "is_gradient_acc")


class NoTextError(Exception):
    """Error: a graph may have a different meaning in a different process, so no text identifies it."""


def exact_text(value: Any) -> str:
    """Return a text that fixes the meaning of a value: a node's argument, or a container of arguments.

    Raises
    ------
    NoTextError : the meaning is not known.
    """
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, sympy.Basic):
        return _expression(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _expression(value.node.expr)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(exact_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{exact_text(k)}: {exact_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({exact_text((value.start, value.stop, value.step))})"
    if is_dataclass(value) and type(value).__module__.startswith("fxdp."):
        own = (exact_text(getattr(value, f.name)) for f in fields(value))
        return f"{type(value).__name__}({', '.join(own)})"
    return _target_name(value)


@lru_cache(maxsize=65536)
def _expression(expr: sympy.Basic) -> str:
    return str(sympy.srepr(expr))  # to the last digit, with the assumptions on each symbol


def _target_name(target: Any) -> str:
    """Return a name of a node's target that has the same meaning in each process.

    Raises
    ------
    NoTextError : the target is user code.
    """
    if isinstance(target, OpOverload) and target.namespace in _NAMESPACES:
        return f"{target._schema.name}.{target._overloadname}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if module.partition(".")[0] in _PACKAGES and name and "<" not in name:
        return f"{module}:{name}"
    raise NoTextError(f"{target} of {type(target).__name__}")


def value_text(value: Any) -> str:
    """Describe a node's value without elements: each tensor as in `tensor_text`, and `is_leaf`.

    Raises
    ------
    NoTextError : a tensor has no strides.
    """
    if isinstance(value, torch.Tensor):
        return f"{tensor_text(value)} {value.is_leaf}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    return exact_text(value)


def tensor_text(value: torch.Tensor) -> str:
    """Describe a tensor without elements: type, dtype, device, requires_grad, shape, strides, offset.

    Raises
    ------
    NoTextError : the tensor has no strides.
    """
    if value.layout != torch.strided:
        raise NoTextError(f"a tensor of layout {value.layout}")
    lies = exact_text((tuple(value.shape), tuple(value.stride()), value.storage_offset()))
    return f"{type(value).__name__} {value.dtype} {value.device} {value.requires_grad} {lies}"


def node_text(node: fx.Node) -> str:
    """Return the exact text of a node, without metadata."""
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    return f"{node.op} {node.name} {target} {exact_text(node.args)} {exact_text(node.kwargs)}"


def graph_bytes(gm: fx.GraphModule) -> bytes:
    """Serialize the graph of a module that has no further attributes.

    Raises
    ------
    NoTextError : the graph reads attributes, or calls user code.
    Exception : any error of pickling.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(len(gm.graph.nodes))
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NoTextError(f"%{node.name} reads an attribute of its module")
        if node.op == "call_function":
            _target_name(node.target)
        meta = {key: node.meta[key] for key in _META if key in node.meta}
        pickler.dump((node.op, node.name, node.target, node.args, node.kwargs, meta, layouts(node)))
    return stream.getvalue()


def graph_of_bytes(content: bytes, name: str) -> fx.GraphModule:
    """Restore a graph from bytes, in a module of a class of that name."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    unpickler = _Unpickler(io.BytesIO(content), made)
    for _ in range(unpickler.load()):
        op, called, target, args, kwargs, meta, known = unpickler.load()
        node = made[called] = graph.create_node(op, target, args, kwargs, name=called)
        if node.name != called:
            raise ValueError(f"two nodes are called {called}")
        node.meta.update(meta)
        set_layouts(node, known)
    return graph_module(torch.nn.Module(), graph, name)


class _Pickler(pickle.Pickler):
    """Pickler that writes nodes and ops by name; a node's arguments were written before the node."""

    # not `persistent_id`, which would be called for each string and number as well
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _node_called, (value.name,)
        if isinstance(value, OpOverload):
            return _op_called, (value._schema.name, value._overloadname)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, made: dict[str, fx.Node]) -> None:
        super().__init__(stream)
        self._made = made

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _node_called.__name__):
            return self._made.__getitem__
        return super().find_class(module, name)


def _node_called(name: str) -> fx.Node:
    raise LookupError(f"%{name} is no node of a graph that is read")


def _op_called(name: str, overload: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)
