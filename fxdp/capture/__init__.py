"""From an unmodified module to one joint forward and backward graph in global, symbolic shapes."""

from fxdp.capture.captured import Captured, Check, Condition, OutputLeaf, Route, SizeLeaf
from fxdp.capture.driver import capture
from fxdp.capture.export.flat_module import register_containers
from fxdp.capture.inputs import resolve_batch_dims, several_rows
from fxdp.capture.refusals.attributes import own_attributes
from fxdp.capture.refusals.input_layouts import check_layouts, unusual

__all__ = [
    "Captured",
    "Check",
    "Condition",
    "OutputLeaf",
    "Route",
    "SizeLeaf",
    "capture",
    "check_layouts",
    "own_attributes",
    "register_containers",
    "resolve_batch_dims",
    "several_rows",
    "unusual",
]
