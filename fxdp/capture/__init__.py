"""From an unmodified module to one joint forward and backward graph in global, symbolic shapes."""

from fxdp.capture.captured import Captured, Check, Condition, OutputLeaf, Route, SizeLeaf
from fxdp.capture.driver import capture, capture_exported
from fxdp.capture.export.exported import Exported
from fxdp.capture.inputs import (
    flatten_inputs,
    register_containers,
    resolve_batch_dims,
    run_model,
    several_rows,
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

__all__ = [
    "Captured",
    "Check",
    "Condition",
    "Exported",
    "JointOptions",
    "OutputLeaf",
    "Route",
    "SizeLeaf",
    "capture",
    "capture_exported",
    "check_layouts",
    "copies_in_order",
    "copy_of",
    "flatten_inputs",
    "lies_in_order",
    "misread",
    "own_attributes",
    "register_containers",
    "resolve_batch_dims",
    "run_model",
    "several_rows",
    "strided_draws",
]
