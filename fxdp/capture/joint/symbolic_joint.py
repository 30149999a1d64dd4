"""The joint graph of a forward with a symbolic batch size, in fxdp's form."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from fxdp.capture.captured import Captured, SizeLeaf
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import AnnotatedJoint, SignatureSpecs, annotate_joint
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.conditions import find_conditions, guards_of, kept_dims, several_values
from fxdp.capture.joint.expanded_joint import expanded
from fxdp.capture.joint.raw_joint import JointOptions, RawJoint, trace_joint
from fxdp.capture.joint.repeated_forward import KEPT, find_layers, shortened
from fxdp.capture.refusals.mixed_dtypes import check_dtypes
from fxdp.errors import CaptureError
from fxdp.ir.repeated_program import OtherLayersError
from fxdp.ir.sizes import fixed_by_data
from fxdp.torch_compat import is_on

_log = logging.getLogger("fxdp")


def symbolic_joint(exported: Exported, options: JointOptions) -> Captured:
    """Return one joint graph for all batch sizes for which the forward graph is valid.

    Raises
    ------
    BatchSpecializedError : the forward or its backward specializes the batch size.
    CaptureError : the graph contains nodes that no program can run.
    """
    # read first: the next steps modify the forward graph in place
    single = () if options.own_statistics else several_values(exported.gm.graph)
    found = _by_layer(exported, options) if is_on("repeated_joint") else None
    raw, sizes, converted = found or _joint(exported, options)
    check_dtypes(converted.gm.graph)
    return Captured(
        gm=converted.gm,
        leaves=tuple(_leaf(leaf, sizes) for leaf in exported.leaves),
        out_spec=exported.out_spec,
        detached=raw.detached,
        symbols=sizes.symbols,
        batch=exported.batch,
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


def _joint(exported: Exported, options: JointOptions) -> tuple[RawJoint, Sizes, AnnotatedJoint]:
    raw = trace_joint(exported, options)
    sizes = Sizes(raw.fakes, exported.batch, [guard for guard, _ in guards_of(raw.shape_env)])
    return raw, sizes, annotate_joint(raw, sizes)


def _by_layer(exported: Exported, options: JointOptions) -> tuple[RawJoint, Sizes, AnnotatedJoint] | None:
    """Trace only a few of many repeated layers, and expand the joint graph; None if layers differ."""
    try:
        layers = find_layers(exported)
    except Exception as error:  # an optimization must not decide whether a model is captured
        _log.debug("repeated layers are left out: no search for them, for a bug in fxdp: %r", error)
        return None
    if layers is None:
        return None
    for reduced in KEPT:
        layers = replace(layers, reduced=reduced)
        raw, sizes, short = _joint(shortened(exported, layers), options)
        try:
            gm = expanded(short.gm, layers, SignatureSpecs(exported.owner, exported.paths))
            gm.graph.lint()
        except OtherLayersError as error:
            _log.debug("%d of %d layers are too few: %s", reduced, layers.count, error)
        except Exception as error:
            _log.debug("repeated layers are left out: lengthening failed, a bug in fxdp: %r", error)
            return None
        else:
            return raw, sizes, replace(short, gm=gm)
    return None


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
