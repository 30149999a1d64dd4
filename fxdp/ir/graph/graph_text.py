"""The text of a graph: one node per line, with type and placement on the binder, then the call.

    mesh(dp=2)
      %fc1_weight: f32[256, 128] {dp=R} = param(fc1.weight)
      %x: f32[B, 128] {dp=S(0)} = input(x)
      %mm: f32[B, 256] {dp=S(0)} = aten.mm(%x, %t)

The text has neither addresses nor source paths, so it is equal on every rank, and ranks compute the hash of
their program from it. A missing brace means "not placed yet".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.metadata import Metadata, meta
from fxdp.ir.graph.signature import (
    Buffer,
    Constant,
    Gradient,
    Input,
    InputSpec,
    Mutation,
    Output,
    OutputSpec,
    Parameter,
    Size,
    StageValue,
    Tangent,
)
from fxdp.ir.types.placements import per_axis
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType, dtype_name
from fxdp.torch_compat import OpOverload

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def graph_text(
    gm: fx.GraphModule, axes: dict[str, int] | None = None, *, causes: bool = True, exact: bool = False
) -> str:
    """Return the graph as golden text; `axes` are the mesh's names and sizes, printed on the first line.

    `exact` prints numbers to the last digit, for hashing.
    """
    axes = axes or {}
    head = ", ".join(f"{name}={size}" for name, size in axes.items())
    lines = [f"mesh({head})"]
    lines += ["  " + node_text(node, tuple(axes), causes=causes, exact=exact) for node in gm.graph.nodes]
    return "\n".join(lines)


def node_text(node: fx.Node, axes: tuple[str, ...] = (), *, causes: bool = True, exact: bool = False) -> str:
    """Return the line of one node."""
    known = meta(node)
    if node.op == "output":
        return _output_text(node)
    type_ = "" if known.type is None else f": {type_text(known.type)}"
    binder = f"%{node.name}{type_}{_placement_text(known, axes)}"
    comments = [known.cause.text] if known.cause and known.cause.text else []
    comments += [f"skip {known.skip}"] if known.skip else []
    comment = f"  # {'; '.join(comments)}" if causes and comments else ""
    return f"{binder} = {_call_text(node, known.spec, exact)}{comment}"


def type_text(type_: NodeType) -> str:
    """Return the text of a type: `f32[B, 128]`, `int(B*7)` for a host number, a tuple for several results."""
    if isinstance(type_, TensorType):
        dtype = _DTYPES.get(type_.dtype, dtype_name(type_.dtype))
        return f"{dtype}[{', '.join(str(n) for n in type_.shape)}]"
    if isinstance(type_, ScalarType):
        return f"int({type_.expr})"
    if isinstance(type_, tuple):
        return f"({', '.join(type_text(t) for t in type_)})"
    return "none"


def _placement_text(known: Metadata, axes: tuple[str, ...]) -> str:
    """Return the placement in braces, `{stage=0 dp=S(0)}`; undecided entries are left out."""
    words = [] if known.stage is None else [f"stage={known.stage}"]
    if known.placement is not None:
        along = [per_axis(placement, axes) for placement in known.placements]
        words += [f"{axis}={', '.join(str(member[axis]) for member in along)}" for axis in axes]
    return " {" + " ".join(words) + "}" if words and axes else ""


def _call_text(node: fx.Node, spec: InputSpec | None, exact: bool) -> str:
    if node.op == "placeholder":
        return _spec_text(spec)
    if node.op == "get_attr":
        return f"constant({node.target})"
    arguments = [_argument_text(a, exact) for a in node.args]
    arguments += [f"{k}={_argument_text(v, exact)}" for k, v in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def target_text(target: Any) -> str:
    """Return the name of a call's target without `.default`: `aten.mm`, `aten.sum.dim_IntList`."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _spec_text(spec: InputSpec | None) -> str:
    match spec:
        case Parameter(name):
            return f"param({name})"
        case Buffer(name):
            return f"buffer({name})"
        case Constant(name):
            return f"constant({name})"
        case Input(index, path):
            return f"input({path or index})"
        case Tangent(index):
            return f"tangent({index})"
        case Size(name):
            return f"size({name})"
        case StageValue(name):
            return f"from({name})"
        case None:
            return "placeholder()"


def _result_text(spec: OutputSpec | None) -> str:
    match spec:
        case Output(index):
            return f"output {index}"
        case Mutation(of):
            return f"new {_spec_text(of)}"
        case Gradient(of):
            return f"gradient {_spec_text(of)}"
        case StageValue(name):
            return f"to {name}"
        case None:
            return "saved"


def _output_text(node: fx.Node) -> str:
    values = node.args[0]
    if not isinstance(values, (tuple, list)):
        return f"return {_argument_text(values)}"
    specs = meta(node).results[: len(values)]
    specs += (None,) * (len(values) - len(specs))  # a malformed graph must be shown, too
    shown = (f"{_result_text(s)}={_argument_text(v)}" for s, v in zip(specs, values, strict=True))
    return f"return {', '.join(shown)}"


def _argument_text(value: Any, exact: bool = False) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument_text(v, exact) for v in value)}]"
    if isinstance(value, float) and not exact:
        return f"{value:.6g}"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    return str(value)
