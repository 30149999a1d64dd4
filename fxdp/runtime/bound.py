"""An emitted program bound to a model's tensors, and its place in autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fxdp.errors import StateError
from fxdp.ir.draws import drawn_seed, node_draws, own_generator, rank_seed
from fxdp.ir.graphs import results_of
from fxdp.ir.metadata import meta
from fxdp.ir.model_tensors import full_value, shard_like
from fxdp.ir.signature import Input, InputSpec, Mutation
from fxdp.lowering.eager import forward_inputs
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.runtime.once_differentiable import once_differentiable
from fxdp.runtime.ranges import Names, ranged
from fxdp.runtime.suppressed_hooks import suppress
from fxdp.runtime.template import CallFrame, TangentSpec
from fxdp.runtime.undefined_gradients import UndefinedGradients
from fxdp.torch_compat import backward_class, release_saved_tensors, without_autocast

_log = logging.getLogger("fxdp")


Like: TypeAlias = "tuple[torch.Size, torch.device]"
"""Shape and device of an output."""

_AVERAGED = (
    "a loss outside the compiled module is averaged over ranks, as DistributedDataParallel does: its "
    "gradient is divided by %d. Pass loss_fn= to fxdp.compile for the global batch's loss."
)
_UNEVEN = (
    "a loss outside the compiled module is a mean of the ranks' means, as their parts of the batch differ in "
    "size: a sample of a small part weighs more. Pass loss_fn= to fxdp.compile for the mean of all samples."
)


@dataclass
class BoundProgram:
    """The forward and backward of one rank for one kind of call.

    A call fills the template with its inputs and sizes, and runs `pair`. Nothing else happens at a step.
    """

    pair: ForwardBackward
    template: CallFrame
    world: int
    rank: int
    seeded: bool
    """Whether the program draws random numbers of its own on each rank."""
    seeded_backward: bool = False
    """Whether the backward, too (a hook that adds noise to gradients)."""
    written: tuple[tuple[int, int], ...] = ()
    """Pairs of position and index of the inputs that the program writes."""
    sharded: tuple[tuple[int, DTensor], ...] = ()
    """The parameters of which this rank holds rows, by position: autograd knows these, the program rows."""
    guarded: Callable[[int], AbstractContextManager[None]] = lambda call: nullcontext()
    """Around each backward of a call: errors of this rank reach the others, theirs reach this one."""
    moment: Callable[[], int] = int
    """Which call is under way, for the ranks to run the same backwards; 0 where none need be noted."""
    full: Callable[[], Mapping[str, Tensor]] = dict
    """The full values of parameters that live from call to call, by the names under which they are read."""
    settled: Callable[[], None] = lambda: None
    """Waits until all ranks have read what this one has shown them; after each forward and backward."""
    messages: tuple[Names, Names] = ((), ())
    """What the forward and what the backward starts, for a profiler."""
    undefined_gradients: UndefinedGradients = field(default_factory=UndefinedGradients)
    """Which gradients are None where a loss does not read all outputs."""
    apart: tuple[int, ...] = ()
    """The positions of what has no gradient in the program: autograd knows of no way to them."""
    takes_sizes: bool = field(init=False)
    """Whether a call must bring its sizes."""
    takes_rows: bool = field(init=False)
    """Whether a call must bring the row numbers of padded gathers."""
    tangents: tuple[TangentSpec, ...] = field(init=False)
    differentiable: frozenset[int] = field(init=False)
    number_positions: tuple[int, ...] | None = None
    """Which of the saved values are host numbers; learnt at the first run."""
    _warned: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.takes_sizes, self.takes_rows = bool(self.template.sizes), self.template.rows is not None
        self.tangents = tuple(t for t in self.template.tangents if isinstance(t, TangentSpec))
        self.differentiable = frozenset(t.output for t in self.tangents)

    @classmethod
    def bind(
        cls,
        gm: fx.GraphModule,
        pair: ForwardBackward,
        values: Mapping[InputSpec, Any],
        *,
        world: int,
        rank: int,
        seeded: bool,
    ) -> BoundProgram:
        """Bind an emitted graph's halves to the tensors in `values`."""
        backward = any(meta(n).backward for n in gm.graph.nodes if node_draws(n))
        written = _written(gm.graph)
        return cls(pair, CallFrame.of(gm, values), world, rank, seeded, seeded and backward, written)

    def run(
        self, inputs: Sequence[Tensor], sizes: Mapping[str, int], rows: Tensor | None, even: bool = True
    ) -> Sequence[Tensor]:
        """This rank's outputs; with a backward if the program has one and gradients are on.

        `even` says whether the ranks' parts of the batch are equal in size.
        """
        values = self.template.filled(inputs, sizes, rows, self.full())
        for given in inputs:
            if given._backward_hooks:
                suppress(given)  # of one whose gradient is left out
        # what the model writes in place reaches the caller, also where a copy stood for his tensor
        copies = [(inputs[i], values[p]) for p, i in self.written if values[p] is not inputs[i]]
        with self._generator(self.seeded), ranged("forward", self.messages[0]):
            outputs = self._run(values, even)
            self.settled()
        with torch.no_grad():
            for given, copy in copies:
                given.copy_(copy)
        return outputs

    def _generator(self, seeded: bool) -> AbstractContextManager[None]:
        """Numbers of this rank's own, which one draw from the user's generator seeds.

        So one seed reproduces a run on a given mesh, and the user's generator moves on equally on all ranks.
        """
        return own_generator(rank_seed(drawn_seed(), self.rank)) if seeded else nullcontext()

    def _run(self, values: list[Any], even: bool) -> Sequence[Tensor]:
        if not self.pair.trains:
            return self.pair.forward(values)
        leaves = list(values)
        for position, parameter in self.sharded:
            leaves[position] = parameter
        for position in self.apart:
            leaves[position] = None
        return _Step.apply(self, even, values, *leaves)  # type: ignore[no-untyped-call,no-any-return]

    def backward(
        self,
        saved: list[Any],
        grads: Sequence[Tensor | None],
        outputs: Sequence[Like],
        even: bool,
        fed: Collection[int] = (),
    ) -> list[Any]:
        """One gradient or None per input, from what autograd brings for the outputs.

        Outputs that are `fed` to another compiled module have gradients of its loss, not of one outside.
        """
        zero = frozenset([i for i, spec in enumerate(self.tangents) if grads[spec.output] is None])
        backward = self.pair.backward(zero)
        specs = [self.tangents[i] for i in backward.tangents]
        self._warn_outside([s for s in specs if s.output not in fed and grads[s.output] is not None], even)
        tangents = [self._tangent(spec, grads, outputs) for spec in specs]
        inputs = [*[saved[i] for i in self.pair.saved_order], *tangents]
        saved.clear()  # the callee empties `inputs`, so that activations are freed as they are used up
        absent = self.undefined_gradients.begin(zero)
        with self._generator(self.seeded_backward), ranged("backward", self.messages[1]):
            results = list(backward.run(inputs))
            self.settled()
        if positions := absent():
            leaves = dict(self.sharded)
            for position in positions:
                results[position] = None
                leaf = leaves.get(position, self.template.values[position])
                if leaf is not None:  # no input
                    suppress(leaf)
        return results

    def _tangent(self, spec: TangentSpec, grads: Sequence[Tensor | None], outputs: Sequence[Like]) -> Tensor:
        grad = grads[spec.output]
        if grad is None:
            shape, device = outputs[spec.output]
            return torch.zeros(shape, dtype=spec.dtype, device=device)
        if spec.sharded and self.world > 1:
            grad = grad / self.world
        return full_value(grad).contiguous()  # a `DTensor`, if a penalty on sharded weights was added

    def _warn_outside(self, specs: Sequence[TangentSpec], even: bool) -> None:
        """Say what a loss outside of compiled modules means, for outputs that such a loss reads."""
        if self.world > 1 and any(spec.sharded for spec in specs):
            self._warn_once(_AVERAGED, self.world)
            if not even:
                self._warn_once(_UNEVEN)

    def _warn_once(self, text: str, *values: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *values)


class _Step(torch.autograd.Function):
    """One forward and backward as a single autograd node."""

    @staticmethod
    def forward(
        ctx: Any, program: BoundProgram, even: bool, values: list[Any], *leaves: Any
    ) -> tuple[Tensor, ...]:
        results = program.pair.forward(values)
        count = program.pair.outputs
        # no views, into which a caller could not write (`loss /= 4`); a write is seen by what is saved
        outputs, saved = tuple(r.detach() for r in results[:count]), list(results[count:])
        numbers = program.number_positions
        if numbers is None:
            numbers = program.number_positions = tuple(
                i for i, v in enumerate(saved) if not isinstance(v, Tensor)
            )
        ctx.program, ctx.even, ctx.call = program, even, program.moment()
        ctx.fed = set()  # outputs that enter another compiled module: runtime/chained_modules.py
        ctx.numbers = [saved.pop(i) for i in reversed(numbers)]
        ctx.save_for_backward(*saved)
        ctx.shapes = [(o.shape, o.device) for o in outputs]
        ctx.mark_non_differentiable(*[o for i, o in enumerate(outputs) if i not in program.differentiable])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        program: BoundProgram = ctx.program
        saved = _saved(ctx)
        release_saved_tensors(ctx)
        for position, number in zip(program.number_positions or (), reversed(ctx.numbers), strict=True):
            saved.insert(position, number)
        with torch.no_grad(), without_autocast(), program.guarded(ctx.call):
            results = program.backward(saved, grads, ctx.shapes, ctx.even, ctx.fed)
            for position, parameter in program.sharded:
                if (gradient := results[position]) is not None:
                    results[position] = shard_like(parameter, gradient)
        return (None, None, None, *once_differentiable(results))


def _saved(ctx: Any) -> list[Tensor]:
    """What a forward has saved, if nobody has written it since: torch counts writes."""
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if "inplace" not in str(error):  # a second backward, say
            raise
        raise StateError(
            "what the backward of a compiled module reads was changed in place after its forward: a "
            "parameter (optimizer.step() before loss.backward()?), an input, a buffer or an output. Expected "
            "values as they were in the forward: run the backward first, or change a copy"
        ) from error


STEP_BACKWARD = backward_class(_Step)
"""The autograd node of every output that a compiled module computed."""


def _written(graph: fx.Graph) -> tuple[tuple[int, int], ...]:
    specs = [meta(n).spec for n in forward_inputs(graph)]
    writes = [s.of for s, _ in results_of(graph) if isinstance(s, Mutation) and isinstance(s.of, Input)]
    return tuple((specs.index(of), of.index) for of in writes)
