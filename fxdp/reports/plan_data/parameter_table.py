"""The parameters of a program as data: placement on the ranks, and reduction of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, fx

from fxdp.capture.locations import Origin
from fxdp.ir.graph.factors import SUFFICIENT_FACTORS
from fxdp.ir.graph.graphs import inputs_of, results_of
from fxdp.ir.graph.metadata import Location, meta, tensor_type
from fxdp.ir.graph.redistribution_cause import unconverted
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.ops.parameter_shards import largest_shard
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import ParamShard
from fxdp.ir.types.value_types import TensorType, dtype_name
from fxdp.reports.places import shown
from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.rows import format_bytes


@dataclass(frozen=True, slots=True, repr=False)
class ParameterRow:
    """One parameter of a plan.

    Attributes
    ----------
    name : the name in the model; for tied parameters the first name.
    shape, dtype : shape and dtype of the full parameter.
    bytes, held : bytes of the full parameter, and bytes that one rank holds.
    placement : `R`: full on every rank; `ParamShard`: sharded along dim 0.
    gradient : whether a gradient is computed.
    reduced_by : keys of the collectives that carry the gradient.
    stages : the pipeline stages that read the parameter.
    location : the user's first line that reads the parameter, with the path of the module.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    held: int
    placement: str
    gradient: bool
    reduced_by: tuple[str, ...]
    stages: tuple[int, ...]
    location: Location

    def __repr__(self) -> str:
        return f"ParameterRow({self.name}: {self.dtype}{list(self.shape)}, {self.placement})"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a number"
        full = "full on every rank" if self.placement == "R" else f"{format_bytes(self.held)} on a rank"
        lines = [f"{self.name}: {self.dtype} {shape}, {format_bytes(self.bytes)}, {self.placement}: {full}"]
        if self.stages:
            lines.append(f"read by stage {', '.join(map(str, self.stages))}")
        reduced = " and ".join(self.reduced_by) or "nothing: all ranks have it, or one does"
        lines.append(f"gradient reduced by {reduced}" if self.gradient else "no gradient")
        return "\n    ".join([*lines, f"first read at {shown(self.location)}"])


def parameter_rows(
    causes: fx.GraphModule, mesh: Mesh, origin: Origin, collectives: Iterable[Collective],
    stages: Mapping[str, tuple[int, ...]],
) -> tuple[ParameterRow, ...]:  # fmt: skip
    """Return one row per parameter that the program reads, in the model's order."""
    made = _gradients(causes)
    carried: dict[str, list[str]] = {}
    for row in collectives:
        for need in row.needs:
            carried.setdefault(need.value, []).append(row.key)
            if need.gradient:  # for a gradient that every rank computes in full, the factors are communicated
                carried.setdefault(need.consumer, []).append(row.key)
    return tuple(
        _row(node, spec, mesh, origin, made, carried, stages.get(spec.name, ()))
        for spec, node in inputs_of(causes.graph, Parameter)
    )


def parameter_row(
    name: str, parameter: Tensor | TensorType, mesh: Mesh, location: Location, *, rows: bool
) -> ParameterRow:
    """Return the row of a parameter without a program, sharded or not."""
    shape = held = tuple(int(n) for n in parameter.shape)
    if rows and shape:
        held = (largest_shard(shape[0], mesh.sharding), *shape[1:])
    return ParameterRow(
        name=name,
        shape=shape,
        dtype=dtype_name(parameter.dtype),
        bytes=prod(shape) * parameter.dtype.itemsize,
        held=prod(held) * parameter.dtype.itemsize,
        placement="ParamShard" if rows and shape else "R",
        gradient=isinstance(parameter, Tensor) and parameter.requires_grad,
        reduced_by=(),
        stages=(),
        location=location,
    )


def _row(
    node: fx.Node, spec: Parameter, mesh: Mesh, origin: Origin, made: Mapping[str, str],
    carried: Mapping[str, list[str]], stages: tuple[int, ...],
) -> ParameterRow:  # fmt: skip
    placement, location = meta(node).placement, origin.of(first_read(node))
    return replace(
        parameter_row(spec.name, tensor_type(node), mesh, location, rows=isinstance(placement, ParamShard)),
        placement=str(placement),
        gradient=spec.name in made,
        reduced_by=tuple(dict.fromkeys(carried.get(made.get(spec.name, ""), ()))),
        stages=stages,
    )


def first_read(node: fx.Node) -> Location:
    """Return the line of the first op that reads a value, skipping redistributions and ops without a line."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop(0).users:
            if meta(user).location.file:
                return meta(user).location
            if user not in seen and user.op != "output":
                seen.add(user)
                pending.append(user)
    return Location()


def _gradients(causes: fx.GraphModule) -> dict[str, str]:
    """Map each parameter to the node of its gradient before reduction, or to the product of its factors."""
    return {
        spec.of.name: _product_of_factors(unconverted(value)).name
        for spec, value in results_of(causes.graph)
        if isinstance(spec, Gradient) and isinstance(spec.of, Parameter)
    }


def _product_of_factors(gradient: fx.Node) -> fx.Node:
    """Return the node that multiplies a gradient's sufficient factors, or the gradient itself."""
    node = gradient
    while meta(node).reason == SUFFICIENT_FACTORS and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if meta(source).reason != SUFFICIENT_FACTORS:
            break
        node = source
    return node
