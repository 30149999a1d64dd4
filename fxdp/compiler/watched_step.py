"""The step of one rank, run op by op in this process, with a watcher that sees the result of every op.

Each part of the program is emitted as for `backend="eager"`; an interpreter takes the place of the generated
code. Collectives are called as in any step: whoever runs several ranks in one process must answer them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from fxdp.compiler.emit import Lowered, WantedPart, device_of, lower_part
from fxdp.compiler.lowered_parts import exact_key
from fxdp.compiler.program import Program
from fxdp.compiler.step_modules import step_modules, wanted_parts
from fxdp.lowering.forward_backward_pair import Boxed, ForwardBackward
from fxdp.lowering.inductor.start import Start
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.p2p import Microbatch
from fxdp.runtime.streams import Streams

Call: TypeAlias = "tuple[Any, tuple[Any, ...], dict[str, Any]]"
"""A function with its arguments."""


@dataclass(frozen=True)
class Moment:
    """When a graph runs within a step.

    Attributes
    ----------
    part : the name of the part, as `stage 0` or `finish 0`.
    block : the number of the micro-batch among those of all ranks; None for a part that runs once per step.
    backward : True in the backward of the part.
    """

    part: str
    block: int | None
    backward: bool

    def __str__(self) -> str:
        where = "once per step" if self.block is None else f"block {self.block}"
        return f"{self.part}, {where}, {'backward' if self.backward else 'forward'}"


Watch: TypeAlias = Callable[[Moment, fx.Node, "Call | None", Any], None]
"""Called after each node of a part with its moment, the node, its call (None: an input) and its result."""


def watched_step(
    program: Program,
    module: nn.Module,
    sizes: Mapping[str, int],
    batches: tuple[int, ...],
    rows: Mapping[str, Tensor],
    watch: Watch,
) -> Callable[[Sequence[Tensor], int], Sequence[Tensor | None]]:
    """Return the step of the rank `program.mesh.rank`, called with its inputs and the seed of the step.

    Parameters
    ----------
    program : a program that is cut, on a mesh without a pipeline axis.
    module : the model with this rank's parameters: plain tensors, of which a sharded one has its own rows.
    sizes, batches, rows : as for `CompiledVariants.make`.
    """
    mesh, layout = program.mesh, program.layout(sizes, batches)
    writer = program.writer(layout, mesh.pipeline.rank)
    graph = writer.write()
    known: dict[Any, Lowered] = {}
    parts = []
    for wanted in wanted_parts(program, layout, batches):
        key = exact_key(wanted)
        if key not in known:
            known[key] = lower_part(wanted, program, module, generic=False, compiled=False, start=Start())
        counts = wanted.once or not layout.is_empty  # the block of a rank without samples is none
        parts.append((wanted, _watched(known[key], wanted, watch) if counts else known[key]))
    streams = Streams.of(device_of(module, mesh))
    modules = step_modules(program, ProcessMesh(mesh), module, parts, layout, lambda: rows, streams)
    step = fx.GraphModule({**modules}, graph, "Step")
    gather = None
    if program.gathers_apart:
        before = writer.write_gathers(program.step_graph(layout, mesh.pipeline.rank))
        gather = fx.GraphModule({**modules}, before, "Gather")

    def run(inputs: Sequence[Tensor], seed: int) -> Sequence[Tensor | None]:
        with torch.no_grad():
            batch = Microbatch(None, tuple(t.detach().contiguous() for t in inputs), seed)
            return step(batch) if gather is None else step(batch, gather(batch))  # type: ignore[no-any-return]

    return run


def _watched(lowered: Lowered, wanted: WantedPart, watch: Watch) -> Lowered:
    block = None if wanted.once else wanted.place
    pair = lowered.pair

    def interpreted(gm: fx.GraphModule, backward: bool) -> Boxed:
        return _Watched(gm, Moment(wanted.name, block, backward), watch).boxed

    watched: ForwardBackward = replace(
        pair, forward=interpreted(pair.forward_graph, False), compiled={},
        compile=lambda gm, half: interpreted(gm, True),
    )  # fmt: skip
    return Lowered(lowered.gm, watched)


class _Watched(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, moment: Moment, watch: Watch) -> None:
        super().__init__(gm)
        self._moment, self._watch = moment, watch

    def boxed(self, arguments: list[Any]) -> Any:
        """Run the graph on a list of arguments, which is emptied."""
        given = [*arguments]
        arguments.clear()
        return self.run(*given)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "call_function"):
            call = None if n.op == "placeholder" else (n.target, *self.fetch_args_kwargs_from_env(n))
            self._watch(self._moment, n, call, result)
        return result
