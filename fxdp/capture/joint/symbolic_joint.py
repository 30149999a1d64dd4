"""The joint graph of a forward with a symbolic batch size, in fxdp's form."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.capture.captured import Captured, SizeLeaf
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import AnnotatedJoint, annotate_joint
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.conditions import find_conditions, guards_of, kept_dims, several_values
from fxdp.capture.joint.raw_joint import JointOptions, RawJoint, trace_joint
from fxdp.capture.refusals.mixed_dtypes import check_dtypes
from fxdp.errors import CaptureError
from fxdp.ir.types.sizes import fixed_by_data
from fxdp.torch_compat import forget_tensors
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
    check_dtypes(converted.gm.graph)
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
        return symbolic_joint(exported, options)
    finally:
        forget_tensors(exported.fakes)


@seam("startup")
def annotated_joint(exported: Exported, options: JointOptions) -> tuple[RawJoint, Sizes, AnnotatedJoint]:
    """Trace the joint graph and annotate its nodes."""
    raw = trace_joint(exported, options)
    sizes = Sizes(
        raw.fakes, exported.batch, [guard for guard, _ in guards_of(raw.shape_env)], exported.axes
    )
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
