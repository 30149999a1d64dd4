"""Estimate for which axis of a ragged batch a step works, from the shapes of its ops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxdp.capture.input_axes import SAMPLES
from fxdp.compiler.program import Program
from fxdp.ir.axis_rows import AxisRow
from fxdp.ir.graph.metadata import meta, tensor_operands
from fxdp.ir.types.sizes import axes_in, by_axis
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.cut.cost import node_cost


def axis_rows(program: Program, split: Sequence[int]) -> tuple[AxisRow, ...]:
    """Return the rows of each rank along the axes of a call, with each axis' share of the work.

    An op works for the axes of what it reads and writes, in equal parts; all axes count equally many rows.
    """
    axes = program.captured.axes
    if not axes.names:
        return (AxisRow.of(SAMPLES, split, 1.0),)
    names = {name: rows.axis for name, rows in zip(axes.names, axes.rows, strict=True) if rows is not None}
    work = dict.fromkeys(by_axis(split), 0.0)
    for node in program.causes.graph.nodes:
        found = sorted(_axes(node) & work.keys())
        for name in found:
            work[name] += node_cost(node) / len(found)
    total = sum(work.values()) or 1.0
    return tuple(
        AxisRow.of(names[name], sizes, work[name] / total) for name, sizes in by_axis(split).items()
    )


def _axes(node: fx.Node) -> set[str]:
    types = (meta(one).type for one in (node, *tensor_operands(node)))
    return {
        name
        for type_ in types
        if isinstance(type_, TensorType)
        for size in type_.shape
        for name in axes_in(size)
    }
