"""The joint graph of a forward with a symbolic batch size, in fxdp's form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxdp.capture.captured import Captured, Condition, SizeLeaf
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import AnnotatedJoint, annotate_joint
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.conditions import find_conditions, guards_of, kept_dims, several_values, sizes_of_one
from fxdp.capture.joint.raw_joint import JointOptions, RawJoint, trace_joint
from fxdp.capture.locations import Origin
from fxdp.errors import CaptureError, InputError
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.sizes import fixed_by_data
from fxdp.ir.types.value_types import TensorType, dtype_name
from fxdp.torch_compat import aten, forget_tensors
from fxdp.wings import seam


@seam("startup")
def symbolic_joint(exported: Exported, options: JointOptions) -> Captured:
    """Return one joint graph for all batch sizes for which the forward graph is valid.

    Raises
    ------
    BatchSpecializedError : the forward or its backward specializes the batch size.
    CaptureError : the graph contains nodes that no program can run.
    """
    # read first: the next steps modify the forward graph in place
    single = () if options.own_statistics else several_values(exported.gm.graph)
    raw, sizes, converted = annotated_joint(exported, options)
    _check_dtypes(converted.gm.graph)
    return Captured(
        gm=converted.gm,
        leaves=tuple(_leaf(leaf, sizes) for leaf in exported.leaves),
        out_spec=exported.out_spec,
        detached=raw.detached,
        symbols=sizes.symbols,
        batch=exported.batch,
        axes=exported.axes,
        constants=converted.constants,
        conditions=(
            *find_conditions(raw.shape_env, sizes),
            *single,
            *(
                kept_dims(converted.gm.graph) if options.couple else ()
            ),  # without decompositions a squeeze sees the global batch
        ),
        checks=exported.checks,
        routes=exported.routes,
    )


def joint_of_forward(exported: Exported, options: JointOptions) -> Captured:
    """Return `symbolic_joint`, and let go of the tensors that torch remembers for the forward's fakes."""
    try:
        found = symbolic_joint(exported, options)
        return replace(found, conditions=(*found.conditions, *_of_one(exported)))
    finally:
        forget_tensors(exported.fakes)


def _of_one(exported: Exported) -> tuple[Condition, ...]:
    """Return the conditions that the questions of the user's code set; no part of a cached joint graph."""
    env = next((fake.fake_mode.shape_env for fake in exported.fakes), None)
    if env is None or not exported.asked:
        return ()
    sizes = Sizes(exported.fakes, exported.batch, [guard for guard, _ in guards_of(env)], exported.axes)
    return sizes_of_one({env.replace(raw): at for raw, at in exported.asked.items()}, sizes)


@seam("startup")
def annotated_joint(exported: Exported, options: JointOptions) -> tuple[RawJoint, Sizes, AnnotatedJoint]:
    """Trace the joint graph and annotate its nodes."""
    raw = trace_joint(exported, options)
    sizes = Sizes(raw.fakes, exported.batch, [guard for guard, _ in guards_of(raw.shape_env)], exported.axes)
    return raw, sizes, annotate_joint(raw, sizes)


def _leaf(leaf: Any, sizes: Sizes) -> Any:
    """Return a leaf of the output; sizes become expressions, and numbers that depend on data are refused."""
    if not isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return leaf
    expr = sizes.expr(leaf)
    if fixed_by_data(expr):
        raise CaptureError(
            "the model returns a Python number read from a tensor (.item(), int() or float()), which no "
            "graph can hold. Return the tensor itself, and read it outside of the model"
        )
    return SizeLeaf(expr)


_PRODUCTS = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default,
    aten.dot.default, aten.convolution.default, aten.linear.default,
})  # fmt: skip


def _check_dtypes(graph: fx.Graph) -> None:
    """Raise if a graph's forward multiplies values of several dtypes.

    A trace runs no kernels, so the error would only occur at the first step, in the middle of the program.

    Raises
    ------
    InputError : with the lines, the dtypes of operands, and the dtypes of the inputs.
    """
    found = [node for node in graph.nodes if node.target in _PRODUCTS and not meta(node).backward]
    mixed = {node: dtypes for node in found if len(dtypes := _dtypes(node)) > 1}
    if not mixed:
        return
    origin = Origin.here()
    lines = dict.fromkeys(f"{', '.join(d)} at {origin.of(meta(node).location)}" for node, d in mixed.items())
    listing = "\n  ".join(lines)
    raise InputError(
        f"values of different dtypes are multiplied:\n  {listing}\nThe inputs are {_inputs(graph)}. Expected "
        "one dtype: convert the inputs, as with x.to(torch.float32), or the model, before it is compiled"
    )


def _dtypes(node: fx.Node) -> tuple[str, ...]:
    types = (meta(operand).type for operand in node.all_input_nodes)
    return tuple(dict.fromkeys(dtype_name(t.dtype) for t in types if isinstance(t, TensorType)))


def _inputs(graph: fx.Graph) -> str:
    named = []
    for spec, node in inputs_of(graph, Input):
        type_ = meta(node).type
        if isinstance(type_, TensorType):
            named.append(f"{spec.path or node.name} {dtype_name(type_.dtype)}")
    return ", ".join(named)
