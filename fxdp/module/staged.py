"""Programs in stages or micro-batches: parts lowered on demand, one written step per sizes of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fxdp.capture import Captured
from fxdp.compiler.emit import LocalProgram
from fxdp.compiler.owners import Homes
from fxdp.compiler.staged_lower import Lowering, modules_of
from fxdp.compiler.staged_order import check_options, prepare_staged
from fxdp.compiler.staged_program import StagedProgram
from fxdp.ir.draws import drawn_seed, node_draws
from fxdp.ir.notes import note
from fxdp.ir.slots import Buffer, Mutation, Parameter
from fxdp.module.call import Call
from fxdp.module.call_sizes import row_numbers, size_values
from fxdp.module.programs import CallKind, Programs, Served, _plain_modes
from fxdp.options import Options
from fxdp.pipeline.schedule import csv
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.ranks.agreement import Agreement, agree
from fxdp.ranks.joined import Joined
from fxdp.runtime.chains import chained
from fxdp.runtime.step import Step
from fxdp.runtime.streams import Streams


class StagedPrograms(Programs):
    """The programs of one model in stages or micro-batches.

    Raises
    ------
    MeshError : options that do not go with stages.
    """

    def __init__(self, module: nn.Module, joined: Joined, options: Options) -> None:
        super().__init__(module, joined, options)
        check_options(options)
        self._homes = Homes()
        self._streams: Streams | None = None

    _differentiable = "loss"

    def _prepare(self, captured: Captured) -> LocalProgram:
        program = prepare_staged(captured, self._mesh, self._options)
        if self._options.gradients == "owner":
            self._homes.add(program)
        return program

    def _compare(self, local: LocalProgram) -> None:
        """Ranks that read other files as their schedule would wait for one another forever."""
        assert isinstance(local, StagedProgram)
        agree(self._joined, csv.write(local.schedule).splitlines(), "schedules")
        super()._compare(local)

    def _make_further(
        self,
        kind: CallKind,
        call: Call,
        batches: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Served:
        dynamic = call.dims != kind.dims
        local = self._captured_for(kind, call, batches, args, kwargs, dynamic=dynamic)
        return self._emit(kind, local, call, batches, generic=False)

    def _emit(
        self, kind: CallKind, local: LocalProgram, call: Call, batches: tuple[int, ...], *, generic: bool
    ) -> Served:
        assert isinstance(local, StagedProgram)
        whole = size_values(local.captured, call, batches, self._mesh.rank)
        layout = MicrobatchSizes.of(whole, self._options.microbatches)
        lowering: Lowering | None = kind.lowerings.get(id(local))
        if lowering is None:
            lowering = kind.lowerings[id(local)] = Lowering(local, self._joined, self._module)
        rows = row_numbers(batches).to(call.tensors[0].device) if len(set(batches)) > 1 else None
        graph = local.writer(layout, self._mesh.pipeline.rank).write()
        with _plain_modes():
            if self._streams is None:
                self._streams = Streams.of(lowering.device)
            modules = modules_of(lowering, local.run_schedule, layout.sizes, rows, self._streams)
        program = fx.GraphModule({**modules}, graph, "Step")
        self.compiled += 1
        return Served(self._step(local, program), program, local, whole)

    def _step(self, local: StagedProgram, program: Any) -> Step:
        results = tuple(slot for slot, _, _ in local.partition.results)
        slots = [note(n).slot for n in local.gm.graph.find_nodes(op="placeholder")]
        buffers = [s.of for s in results if isinstance(s, Mutation) and isinstance(s.of, Buffer)]
        return Step(
            program,
            results,
            {s: self._module.get_parameter(s.name) for s in slots if isinstance(s, Parameter)},
            {s: self._module.get_buffer(s.name) for s in buffers},
            local.loss,
            local.not_differentiated,
            self._seed(local),
        )

    def _seed(self, local: StagedProgram) -> Callable[[], int]:
        """Numbers that all stages share are drawn by each rank for itself, so from the same seed."""
        prologue = local.partition.prologue
        if prologue is not None and self._mesh.pipeline.size > 1 and _draws(prologue.gm):
            return lambda: Agreement(self._joined).exchange((drawn_seed(),))[0][0]
        return drawn_seed if _draws(local.gm) else int

    def run(self, served: Served, call: Call, batches: tuple[int, ...]) -> Any:
        """Run a call; the model's own output structure."""
        captured = served.local.captured
        sizes = size_values(captured, call, batches, self._mesh.rank)
        tensors = chained(call.tensors, call.batch_dims, self._mesh.size)
        outputs: Sequence[Tensor] = served.program.run(tensors)
        return self._pack(captured, outputs, sizes)


def _draws(gm: fx.GraphModule) -> bool:
    return any(map(node_draws, gm.graph.nodes))
