"""From an unmodified module to one joint forward and backward graph in global, symbolic shapes."""

from fxdp.capture.captured import Captured, Check, Condition, OutputLeaf, Route, SizeLeaf
from fxdp.capture.driver import capture, capture_exported, capture_request
from fxdp.capture.export.exported import Exported
from fxdp.capture.inputs import (
    LEFT_OUT,
    Inputs,
    check_plain_tensors,
    flat_leaves,
    leaf_names,
    read_inputs,
    resolve_batch_dims,
    run_model,
    spread_prefix,
)
from fxdp.capture.joint import JointOptions
from fxdp.capture.refusals.input_layouts import (
    check_layouts,
    copies_in_order,
    lies_in_order,
    misread,
    strided_draws,
)
from fxdp.capture.refusals.stateful import copy_of, own_attributes
from fxdp.capture.request import Request

__all__ = [
    "LEFT_OUT",
    "Captured",
    "Check",
    "Condition",
    "Exported",
    "Inputs",
    "JointOptions",
    "OutputLeaf",
    "Request",
    "Route",
    "SizeLeaf",
    "capture",
    "capture_exported",
    "capture_request",
    "check_layouts",
    "check_plain_tensors",
    "copies_in_order",
    "copy_of",
    "flat_leaves",
    "leaf_names",
    "lies_in_order",
    "misread",
    "own_attributes",
    "read_inputs",
    "resolve_batch_dims",
    "run_model",
    "spread_prefix",
    "strided_draws",
]
