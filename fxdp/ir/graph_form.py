"""Graphs beside their modules: as text that says all of them, and as bytes that bring them back.

`exact_text`: equal texts are equal programs; what it cannot say (a function of the user's, a tensor) is an
error, and the graph has no text. `graph_bytes`, `graph_of_bytes`: nodes with their notes, and how captured
values lay in memory, without the example values themselves.
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

from fxdp.ir.metadata import layouts, set_layouts
from fxdp.torch_compat import OpOverload, graph_module

_NAMESPACES = frozenset({"aten", "prims", "fxdp", "_c10d_functional", "c10d_functional"})
"""Ops whose meaning comes with the versions of torch and fxdp; others are their user's."""

_PACKAGES = frozenset({"fxdp", "torch", "_operator", "math"})
"""Where functions come from that nodes call beside ops: sizes are computed by Python's operators."""
_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format, type(...))  # fmt: skip
_META = ("fxdp", "seq_nr", "is_gradient_acc")


class NoTextError(Exception):
    """A graph that means something else from run to run, or may: it cannot be told apart by a text."""


def exact_text(value: Any) -> str:
    """All that decides what a value means: an argument of a node, or something made of such.

    Raises
    ------
    NoTextError : that is not known.
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
    return target_name(value)


@lru_cache(maxsize=65536)
def _expression(expr: sympy.Basic) -> str:
    return str(sympy.srepr(expr))  # to the last digit, and with what is assumed of each symbol


def target_name(target: Any) -> str:
    """What a node calls, by a name that means the same in each process.

    Raises
    ------
    NoTextError : it is the user's.
    """
    if isinstance(target, OpOverload) and target.namespace in _NAMESPACES:
        return f"{target._schema.name}.{target._overloadname}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if module.partition(".")[0] in _PACKAGES and name and "<" not in name:
        return f"{module}:{name}"
    raise NoTextError(f"{target} of {type(target).__name__}")


def value_text(value: Any) -> str:
    """What a node gives, without its values: how each tensor lies, and whether it has a gradient.

    Raises
    ------
    NoTextError : a tensor without strides.
    """
    if isinstance(value, torch.Tensor):
        return f"{tensor_text(value)} {value.is_leaf}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    return exact_text(value)


def tensor_text(value: torch.Tensor) -> str:
    """The same of one tensor."""
    if value.layout != torch.strided:
        raise NoTextError(f"a tensor of layout {value.layout}")
    lies = exact_text((tuple(value.shape), tuple(value.stride()), value.storage_offset()))
    return f"{type(value).__name__} {value.dtype} {value.device} {value.requires_grad} {lies}"


def node_text(node: fx.Node) -> str:
    """A node without what is known of it."""
    target = node.target if isinstance(node.target, str) else target_name(node.target)
    return f"{node.op} {node.name} {target} {exact_text(node.args)} {exact_text(node.kwargs)}"


def graph_bytes(gm: fx.GraphModule) -> bytes:
    """The graph of a module that holds nothing beside it.

    Raises
    ------
    NoTextError : it reads attributes, or calls what is the user's.
    Exception : whatever pickling raises.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(len(gm.graph.nodes))
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NoTextError(f"%{node.name} reads an attribute of its module")
        if node.op == "call_function":
            target_name(node.target)
        meta = {key: node.meta[key] for key in _META if key in node.meta}
        pickler.dump((node.op, node.name, node.target, node.args, node.kwargs, meta, layouts(node)))
    return stream.getvalue()


def graph_of_bytes(content: bytes, name: str) -> fx.GraphModule:
    """The graph again, in a module of a class of that name."""
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
    """Writes nodes and ops by name; a node's arguments were written before it."""

    # not `persistent_id`, which is asked of each string and number as well
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
