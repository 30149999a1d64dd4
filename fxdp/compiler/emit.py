"""The way from a captured model to a program: the order of passes, as data."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

import fxdp.rules  # noqa: F401 - registers the rules
from fxdp.capture import Captured
from fxdp.compiler.pass_manager import Pass, PassManager
from fxdp.compiler.refused_ops import refuse_fallbacks
from fxdp.errors import FxdpError
from fxdp.ir.draws import node_draws
from fxdp.ir.dtensor_specs import annotated, data_mesh
from fxdp.ir.graph_text import graph_text
from fxdp.ir.graphs import copy_graph
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.model_tensors import slot_values
from fxdp.ir.slots import Slot
from fxdp.lowering import Halves, lower_eager, lower_inductor
from fxdp.lowering.inductor.start import start_of
from fxdp.lowering.shapes import Shapes, SizesFixedError
from fxdp.options import Options
from fxdp.passes import (
    BatchDimAnalyzer,
    BucketGradients,
    Canonicalize,
    CoalesceReductions,
    EmitProgram,
    ExpandRecipes,
    InsertCollectives,
    LocalizeShapes,
)
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.failure import guard
from fxdp.ranks.joined import Joined
from fxdp.reports.coverage import coverage
from fxdp.reports.plan import Plan, communication, program_text, replicated_ops
from fxdp.runtime.bound import Bound

_log = logging.getLogger("fxdp")


def global_passes(captured: Captured, options: Options) -> list[Pass]:
    """From CAPTURED to EXPLICIT: the program of the whole batch with its communication."""
    return [
        Canonicalize(),
        BatchDimAnalyzer(captured.batch, options.single_device_rng),
        ExpandRecipes(),
        InsertCollectives(options.single_device_rng),
    ]


def local_passes(captured: Captured, options: Options) -> list[Pass]:
    """From EXPLICIT to LOCAL: the program of one rank, its sizes still open."""
    return [
        LocalizeShapes(tuple(captured.symbols)),
        BucketGradients(options.bucket_bytes),
        CoalesceReductions(),
    ]


def emission_passes(sizes: Mapping[str, int] | None, even: bool) -> list[Pass]:
    """From LOCAL to EMITTED, for fixed sizes or for any."""
    return [EmitProgram(None if sizes is None else tuple(sizes.items()), even)]


@dataclass
class LocalProgram:
    """A model compiled down to one rank's program with open sizes; programs are emitted from it."""

    captured: Captured
    gm: fx.GraphModule
    mesh: Mesh
    options: Options
    causes: fx.GraphModule
    """The program before bucketing: one collective per value."""
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: int = 0

    @property
    def text(self) -> str:
        """The golden text of the program, the same on all ranks."""
        return program_text(self.gm, self.mesh.shape)

    @property
    def digest(self) -> str:
        """A hash of the program that ranks compare, constants to the last digit."""
        text = graph_text(self.gm, {"ranks": self.mesh.size}, causes=False, exact=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def graph(self, sizes: Mapping[str, int], device_mesh: DeviceMesh | None = None) -> fx.GraphModule:
        """The program of the whole batch with its collectives and a `DTensorSpec` on each tensor's node."""
        return annotated(self.causes, data_mesh(self.mesh, device_mesh), sizes)

    def plan(self, sizes: Mapping[str, int], device_mesh: DeviceMesh | None = None) -> Plan:
        """The plan at the given sizes (`B` and further symbols)."""
        rows, causes = communication(self.gm, sizes, self.mesh), communication(self.causes, sizes)
        covered = coverage(self.causes, sizes)
        return Plan(
            self.text, rows, causes, replicated_ops(self.gm), dict(self.seconds), self.nodes, covered,
            annotated=lambda: self.graph(sizes, device_mesh),
        )  # fmt: skip


def prepare(captured: Captured, mesh: Mesh, options: Options) -> LocalProgram:
    """Run the passes down to LOCAL.

    Raises
    ------
    PlacementError : with `strict=True`, an op would run replicated because it has no rule.
    """
    dump_dir = Path(options.dump_dir) if options.dump_dir is not None and mesh.rank == 0 else None
    manager = PassManager(mesh, options.verify, dump_dir)
    nodes = len(captured.gm.graph.nodes)
    gm = manager.run(captured.gm, global_passes(captured, options))
    if options.strict:
        refuse_fallbacks(gm)
    causes = copy_graph(gm)
    gm = manager.run(gm, local_passes(captured, options))
    return LocalProgram(captured, gm, mesh, options, causes, manager.seconds, nodes)


def emit(
    local: LocalProgram,
    joined: Joined,
    module: nn.Module,
    sizes: Mapping[str, int],
    *,
    generic: bool,
    even: bool,
) -> tuple[Bound, fx.GraphModule]:
    """This rank's executable program, for these sizes or (`generic`) for any.

    `sizes` has `B`, `b`, `offset`, `b_max` and the program's further symbols.
    """
    manager = PassManager(local.mesh, local.options.verify, level=Level.LOCAL)
    gm = manager.run(copy_graph(local.gm), emission_passes(None if generic else sizes, even))
    values = slot_values(gm.graph, module, local.captured.constants)
    start = time.perf_counter()
    halves = _lower(gm, values, sizes, local, joined, generic=generic, device=_device(module, local.mesh))
    seeded = (
        local.mesh.size > 1 and not local.options.single_device_rng and any(map(node_draws, gm.graph.nodes))
    )
    program = Bound.bind(gm, halves, values, world=local.mesh.size, rank=local.mesh.rank, seeded=seeded)
    program.guarded = lambda: guard(joined)
    local.seconds["emit-program"] = local.seconds.get("emit-program", 0.0) + manager.seconds["emit-program"]
    local.seconds["lowering"] = local.seconds.get("lowering", 0.0) + time.perf_counter() - start
    return program, gm


def _lower(
    gm: fx.GraphModule, values: Mapping[Slot, Any], sizes: Mapping[str, int], local: LocalProgram,
    joined: Joined, *, generic: bool, device: torch.device,
) -> Halves:  # fmt: skip
    if local.options.compute == "eager":
        return lower_eager(gm)
    mesh = local.mesh
    start = start_of() if joined.links is None else start_of(mesh.rank, lambda: _barrier(joined))
    halves, fixed, failure = None, (), ""
    try:
        halves = lower_inductor(gm, values, Shapes(sizes, generic, mesh.size == 1), device, start)
    except SizesFixedError as error:
        fixed = error.args
    except FxdpError:
        raise
    except Exception as error:  # whatever Inductor may raise, the program runs without it
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    start.finish()
    found = gather_objects(joined, (fixed, failure))
    if names := next((names for names, _ in found if names), ()):
        raise SizesFixedError(*names)
    if failures := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]:
        _log.warning(
            "Inductor cannot compile this program (%s): its ops run as they are on all ranks, as with "
            'compute="eager", with the same results',
            failures[0],
        )
        return lower_eager(gm)
    assert halves is not None
    return halves


def _barrier(joined: Joined) -> None:
    gather_objects(joined, None)


def _device(module: nn.Module, mesh: Mesh) -> torch.device:
    first = next(iter(module.parameters()), None)
    return first.device if first is not None else torch.device(mesh.device_type)
