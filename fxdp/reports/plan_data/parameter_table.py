"""The parameters of a program as data: how each lies on the ranks, and what reduces its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, fx

from fxdp.capture.sites import Origin
from fxdp.ir.conversion_cause import unconverted
from fxdp.ir.factors import product_of_factors
from fxdp.ir.graphs import inputs_of, results_of
from fxdp.ir.mesh import Mesh
from fxdp.ir.notes import Site, note, tensor_type
from fxdp.ir.ops.parameter_rows import most_rows
from fxdp.ir.placements import Rows
from fxdp.ir.slots import Gradient, Parameter
from fxdp.ir.types import TensorType, dtype_name
from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.rows import format_bytes


@dataclass(frozen=True, slots=True, repr=False)
class ParameterRow:
    """One parameter of a plan.

    Attributes
    ----------
    name : as in the model; of tied ones the first.
    shape, dtype : of the whole.
    bytes, held : of the whole, and of what one rank holds.
    placement : `R`: whole on every rank; `Rows`: its rows of dim 0.
    gradient : whether a gradient is computed.
    reduced_by : the collectives that carry its gradient, by their keys.
    stages : the pipeline stages that read it.
    site : the user's line that first reads it, with the path of the module.
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
    site: Site

    def __repr__(self) -> str:
        return f"ParameterRow({self.name}: {self.dtype}{list(self.shape)}, {self.placement})"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a number"
        whole = "whole on every rank" if self.placement == "R" else f"{format_bytes(self.held)} on a rank"
        lines = [f"{self.name}: {self.dtype} {shape}, {format_bytes(self.bytes)}, {self.placement}: {whole}"]
        if self.stages:
            lines.append(f"read by stage {', '.join(map(str, self.stages))}")
        reduced = " and ".join(self.reduced_by) or "nothing: all ranks have it, or one does"
        lines.append(f"gradient reduced by {reduced}" if self.gradient else "no gradient")
        return "\n    ".join([*lines, f"first read at {self.site}"])


def parameter_rows(
    causes: fx.GraphModule, mesh: Mesh, origin: Origin, collectives: Iterable[Collective],
    stages: Mapping[str, tuple[int, ...]],
) -> tuple[ParameterRow, ...]:  # fmt: skip
    """One row per parameter that the program reads, in the model's order."""
    made = _gradients(causes)
    carried: dict[str, list[str]] = {}
    for row in collectives:
        for need in row.needs:
            carried.setdefault(need.value, []).append(row.key)
            if need.gradient:  # of a gradient that every rank computes whole its factors travel
                carried.setdefault(need.consumer, []).append(row.key)
    return tuple(
        _row(node, slot, mesh, origin, made, carried, stages.get(slot.name, ()))
        for slot, node in inputs_of(causes.graph, Parameter)
    )


def parameter_row(
    name: str, parameter: Tensor | TensorType, mesh: Mesh, site: Site, *, rows: bool
) -> ParameterRow:
    """The row of a parameter of which no program is known, dealt out in rows or not."""
    shape = held = tuple(int(n) for n in parameter.shape)
    if rows and shape:
        held = (most_rows(shape[0], mesh.dealing), *shape[1:])
    return ParameterRow(
        name=name,
        shape=shape,
        dtype=dtype_name(parameter.dtype),
        bytes=prod(shape) * parameter.dtype.itemsize,
        held=prod(held) * parameter.dtype.itemsize,
        placement="Rows" if rows and shape else "R",
        gradient=isinstance(parameter, Tensor) and parameter.requires_grad,
        reduced_by=(),
        stages=(),
        site=site,
    )


def _row(
    node: fx.Node, slot: Parameter, mesh: Mesh, origin: Origin, made: Mapping[str, str],
    carried: Mapping[str, list[str]], stages: tuple[int, ...],
) -> ParameterRow:  # fmt: skip
    placement, site = note(node).placement, origin.of(first_read(node))
    return replace(
        parameter_row(slot.name, tensor_type(node), mesh, site, rows=isinstance(placement, Rows)),
        placement=str(placement),
        gradient=slot.name in made,
        reduced_by=tuple(dict.fromkeys(carried.get(made.get(slot.name, ""), ()))),
        stages=stages,
    )


def first_read(node: fx.Node) -> Site:
    """The line of the first op that reads a value, through conversions and other ops without a line."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop(0).users:
            if note(user).site.file:
                return note(user).site
            if user not in seen and user.op != "output":
                seen.add(user)
                pending.append(user)
    return Site()


def _gradients(causes: fx.GraphModule) -> dict[str, str]:
    """By parameter, the node of its gradient before that is reduced, or of what multiplies its factors."""
    return {
        slot.of.name: product_of_factors(unconverted(value)).name
        for slot, value in results_of(causes.graph)
        if isinstance(slot, Gradient) and isinstance(slot.of, Parameter)
    }
