"""Turn a part at LOCAL into code: for fixed sizes or for any, compiled by Inductor or as eager ops."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from fxdp.compiler.order import emission
from fxdp.compiler.pass_manager import PassManager
from fxdp.compiler.program import Program
from fxdp.ir.graph.graphs import copy_graph, no_collection
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.model_tensors import signature_values
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.sizes import is_even, samples_of
from fxdp.lowering.eager import lower_eager
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.lowering.inductor.compile import LoweringOptions, lower_inductor
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.shapes import Shapes
from fxdp.pipeline.cut.partition import Part, summed

FULL = "this program"
"""Name of the single part of a program that is not cut."""


@dataclass(frozen=True)
class WantedPart:
    """A part together with the sizes and options for which this rank needs code."""

    name: str
    part: Part
    sizes: Mapping[str, int]
    """`B`, `b`, `offset`, `b_max` and the program's further symbols."""
    batches: tuple[int, ...]
    """The batch sizes of all data ranks."""
    place: int
    """Index of the part's samples among the local batches of all ranks and micro-batches."""
    index: int | None = None
    """The micro-batch; None: the part runs once for this rank's entire batch."""
    once: bool = False
    """True for a part of a few ops that joins or prepares micro-batches, and is never compiled."""
    zero: frozenset[int] | None = None
    """Indices of the zero tangents of the backward compiled ahead of time; None: as usual in training."""
    first: tuple[int, ...] | None = None
    """Indices of the results of the input-gradient half, if the backward runs in two halves."""
    unhalved: bool = True
    """True if the backward also runs undivided."""

    @property
    def label(self) -> str:
        """Name and micro-batch of the part, for messages."""
        return self.name if self.index is None else f"{self.name}, micro-batch {self.index}"


@dataclass(frozen=True, eq=False)
class Lowered:
    """An emitted part, with the code of the forward and the backward."""

    gm: fx.GraphModule
    """The emitted graph."""
    pair: ForwardBackward


def lower_part(
    wanted: WantedPart, program: Program, module: nn.Module, *, generic: bool, compiled: bool, start: Start
) -> Lowered:
    """Emit and lower one part, for fixed sizes or (`generic`) for any, by Inductor if `compiled`.

    Raises
    ------
    SizesFixedError : the part's ops support fixed sizes only.
    Exception : any error that Inductor raises.
    """
    mesh, options, part = program.mesh, program.options, wanted.part
    even = is_even(wanted.batches) and not (generic and mesh.size > 1)
    manager = PassManager(mesh, options.debug.verify, level=Level.LOCAL)
    samples = samples_of(wanted.batches)
    by_tree = (samples, options.block) if options.block and wanted.once and samples else None
    passes = emission(None if generic else wanted.sizes, even, wanted.place, by_tree)
    gm = manager.run(copy_graph(part.gm), passes)
    _add_seconds(program, "emit-program", manager.seconds["emit-program"])
    began = time.perf_counter()
    with no_collection():
        pair = _lowered(gm, wanted, program, module, generic, start if compiled else None)
        if wanted.first is not None and pair.trains:
            pair.halved(wanted.first)  # now, so that a failing compilation is noticed before the first step
    _add_seconds(program, "lowering", time.perf_counter() - began)
    return Lowered(gm, pair)


def _lowered(
    gm: fx.GraphModule, wanted: WantedPart, program: Program, module: nn.Module, generic: bool,
    start: Start | None,
) -> ForwardBackward:  # fmt: skip
    """Lower forward and backward of an emitted part, by Inductor or (without `start`) as eager ops."""
    mesh, options, part = program.mesh, program.options, wanted.part
    if start is None:
        return lower_eager(gm, wanted.zero, summed(part))
    values = signature_values(gm.graph, module, program.captured.constants)
    single = mesh.size == 1 and (program.step is None or not options.has_microbatches)
    how = LoweringOptions(
        wanted.zero, summed(part), None if wanted.unhalved else wanted.first,
        options.activation_checkpointing.memory_budget,
        hides=not mesh.shared_memory,  # no transfers to overlap
        in_place=mesh.group("messages") if mesh.direct_sums else "",
    )  # fmt: skip
    shapes = Shapes(dict(wanted.sizes), generic, single, program.images & {one.name for one in part.reads})
    return lower_inductor(gm, values, shapes, device_of(module, mesh), start, how)


def device_of(module: nn.Module, mesh: Mesh) -> torch.device:
    """Return the device of the model."""
    first = next(iter(module.parameters()), None)
    return first.device if first is not None else torch.device(mesh.device_type)


def _add_seconds(program: Program, what: str, seconds: float) -> None:
    program.seconds[what] = program.seconds.get(what, 0.0) + seconds
