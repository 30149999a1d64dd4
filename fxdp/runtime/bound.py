"""An emitted program bound to a model's tensors, as a node of autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fxdp.errors import StateError
from fxdp.ir.graph.draws import drawn_seed, node_draws, own_generator, rank_seed
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.model_tensors import full_value, shard_like
from fxdp.ir.graph.signature import Input, InputSpec, Mutation
from fxdp.ir.ops.sparse_rows import sparse_gradient
from fxdp.lowering.eager import forward_inputs
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.runtime.once_differentiable import once_differentiable
from fxdp.runtime.ranges import Names, ranged
from fxdp.runtime.suppressed_hooks import suppress
from fxdp.runtime.template import CallFrame, TangentSpec
from fxdp.runtime.undefined_gradients import UndefinedGradients
from fxdp.torch_compat import backward_class, release_saved_tensors, without_autocast

_log = logging.getLogger("fxdp")


_Like: TypeAlias = "tuple[torch.Size, torch.device]"
"""Shape and device of an output."""
_like = attrgetter("shape", "device")
_NONE = frozenset[int]()

AVERAGED = (
    "a loss outside the compiled module is averaged over ranks, as DistributedDataParallel does: its "
    "gradient is divided by %d. Pass loss_fn= to fxdp.compile for the global batch's loss."
)
_UNEVEN = (
    "a loss outside the compiled module is a mean of the ranks' means, as their parts of the batch differ in "
    "size: a sample of a small part weighs more. Pass loss_fn= to fxdp.compile for the mean of all samples."
)


@dataclass
class BoundProgram:
    """The forward and backward of one rank, for one cache entry of calls.

    A call fills the template with inputs and sizes, and runs `pair`. A step does nothing beyond that.
    """

    pair: ForwardBackward
    template: CallFrame
    world: int
    rank: int
    seeded: bool
    """True if the program draws random numbers that differ between ranks."""
    seeded_backward: bool = False
    """True if the backward draws random numbers, too (a hook that adds noise to gradients)."""
    written: tuple[tuple[int, int], ...] = ()
    """Pairs of position and index of the inputs that the program writes."""
    sharded: tuple[tuple[int, DTensor], ...] = ()
    """Sharded parameters by position: autograd sees the `DTensor`, the program reads the local shard."""
    sparse: tuple[tuple[int, torch.Size], ...] = ()
    """Parameters with a sparse gradient, which the program returns as rows: position and size."""
    guarded: Callable[[int], AbstractContextManager[None]] = lambda call: nullcontext()
    """Context for each backward of a call: an error on this rank reaches all ranks, and vice versa."""
    moment: Callable[[], int] = int
    """Returns the number of the current call, so that ranks run backwards in one order; 0 if not needed."""
    full: Callable[[], Mapping[str, Tensor]] = dict
    """Returns the unsharded parameters that live across calls, by the names used in the program."""
    settled: Callable[[], None] | None = None
    """Waits until all ranks have read this rank's published shards; called after forward and backward."""
    messages: tuple[Names, Names] = ((), ())
    """The collectives started by the forward and by the backward, for a profiler."""
    undefined_gradients: UndefinedGradients = field(default_factory=UndefinedGradients)
    """Determines the gradients that are None if a loss does not read all outputs."""
    apart: tuple[int, ...] = ()
    """The positions of inputs without a gradient, which autograd does not see."""
    takes_sizes: bool = field(init=False)
    """True if a call must pass its sizes."""
    takes_rows: bool = field(init=False)
    """True if a call must pass the row indices of padded gathers."""
    tangents: tuple[TangentSpec, ...] = field(init=False)
    differentiable: frozenset[int] = field(init=False)
    number_positions: tuple[int, ...] | None = None
    """The positions of host numbers among the saved values; determined in the first run."""
    _warned: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.takes_sizes, self.takes_rows = bool(self.template.sizes), bool(self.template.rows)
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
        """Bind the forward and backward of an emitted graph to the tensors in `values`."""
        backward = any(meta(n).backward for n in gm.graph.nodes if node_draws(n))
        written = _written(gm.graph)
        return cls(pair, CallFrame.of(gm, values), world, rank, seeded, seeded and backward, written)

    def run(
        self, inputs: Sequence[Tensor], sizes: Mapping[str, int], rows: Mapping[str, Tensor],
        even: bool = True,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Return this rank's outputs, with a backward if the program has one and gradients are enabled.

        `even` says whether the local batches of all ranks have equal sizes.
        """
        values = self.template.filled(inputs, sizes, rows, self.full())
        for given in inputs:
            if given._backward_hooks:
                suppress(given)  # the hooks of an input whose gradient is None must not run
        # in-place writes of the model must reach the caller's tensor, even if the program got a copy
        copies = (
            [(inputs[i], values[p]) for p, i in self.written if values[p] is not inputs[i]]
            if self.written
            else ()
        )
        with self._around(self.seeded, "forward", self.messages[0]):
            outputs = self._run(values, even)
            if self.settled is not None:
                self.settled()
        if copies:
            with torch.no_grad():
                for given, copy in copies:
                    given.copy_(copy)
        return outputs

    def _around(self, seeded: bool, what: str, names: Names) -> AbstractContextManager[None]:
        """Return the range of a half under a profiler, with the generator of a half that draws numbers."""
        return self._drawing(what, names) if seeded else ranged(what, names)

    @contextmanager
    def _drawing(self, what: str, names: Names) -> Iterator[None]:
        """Draw this rank's own random numbers, seeded by one draw from the user's generator.

        So one seed reproduces a run on a given mesh, and the user's generator advances equally on all ranks.
        """
        with own_generator(rank_seed(drawn_seed(), self.rank)), ranged(what, names):
            yield

    def _run(self, values: list[Any], even: bool) -> Sequence[Tensor]:
        if self.pair.backward_graph is None:
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
        outputs: Sequence[_Like],
        even: bool,
        fed: Collection[int] = (),
    ) -> list[Any]:
        """Return one gradient or None per input, given autograd's gradients of the outputs.

        An output that is `fed` to another compiled module gets a gradient of that module's loss; a loss
        outside of compiled modules is not involved.
        """
        zero, tangents, inputs = _NONE, list[Tensor](), list(map(saved.__getitem__, self.pair.saved_order))
        if any(map(is_, grads, repeat(None))):
            zero = frozenset([i for i, spec in enumerate(self.tangents) if grads[spec.output] is None])
        backward = self.pair.backward(zero)
        for i in backward.tangents:
            spec = self.tangents[i]
            if self.world > 1 and spec.sharded and spec.output not in fed and grads[spec.output] is not None:
                self._warn_outside(even)
            tangents.append(self._tangent(spec, grads, outputs))
        inputs += tangents
        saved.clear()  # the callee empties `inputs`, so that each activation is freed after its last use
        absent = self.undefined_gradients.begin(zero)
        with self._around(self.seeded_backward, "backward", self.messages[1]):
            results = list(backward.run(inputs))
            if self.settled is not None:
                self.settled()
        for position, size in self.sparse:
            if results[position] is not None:
                results[position] = sparse_gradient(results[position], size)
        if positions := absent():
            leaves = dict(self.sharded)
            for position in positions:
                results[position] = None
                leaf = leaves.get(position, self.template.values[position])
                if leaf is not None:  # None for an input
                    suppress(leaf)
        return results

    def _tangent(self, spec: TangentSpec, grads: Sequence[Tensor | None], outputs: Sequence[_Like]) -> Tensor:
        grad = grads[spec.output]
        if grad is None:
            shape, device = outputs[spec.output]
            return torch.zeros(shape, dtype=spec.dtype, device=device)
        if spec.sharded and self.world > 1:
            grad = grad / self.world
        return full_value(grad).contiguous()  # a `DTensor`, if a penalty on sharded weights was added

    def _warn_outside(self, even: bool) -> None:
        """Warn how a loss outside of compiled modules is reduced, as such a loss reads an output."""
        self._warn_once(AVERAGED, self.world)
        if not even:
            self._warn_once(_UNEVEN)

    def _warn_once(self, text: str, *values: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *values)


class _Step(torch.autograd.Function):
    """Forward and backward of a program as a single autograd node."""

    @staticmethod
    def forward(
        ctx: Any, program: BoundProgram, even: bool, values: list[Any], *leaves: Any
    ) -> tuple[Tensor, ...]:
        results = program.pair.forward(values)
        count = program.pair.outputs
        # no views, into which a caller could not write (`loss /= 4`); saved values see such a write
        outputs, saved = tuple(map(Tensor.detach, results[:count])), list(results[count:])
        numbers = program.number_positions
        if numbers is None:
            numbers = program.number_positions = tuple(
                i for i, v in enumerate(saved) if not isinstance(v, Tensor)
            )
        ctx.program, ctx.even, ctx.call = program, even, program.moment()
        ctx.fed = set()  # outputs that enter another compiled module: runtime/chained_modules.py
        ctx.numbers = [saved.pop(i) for i in reversed(numbers)] if numbers else ()
        ctx.save_for_backward(*saved)
        ctx.shapes = list(map(_like, outputs))
        if len(program.differentiable) < len(outputs):
            fixed = [o for i, o in enumerate(outputs) if i not in program.differentiable]
            ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if getattr(ctx, REPLACED, False):
            return (None,) * len(ctx.needs_input_grad)
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
    """Return the saved values of a forward; raise if a value was written since, as counted by torch."""
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if "inplace" not in str(error):  # for example, a second backward
            raise
        raise StateError(
            "what the backward of a compiled module reads was changed in place after its forward: a "
            "parameter (optimizer.step() before loss.backward()?), an input, a buffer or an output. Expected "
            "values as they were in the forward: run the backward first, or change a copy"
        ) from error


REPLACED = "fxdp_replaced"
"""Attribute of a call's autograd node whose gradients another node gives."""

STEP_BACKWARD = backward_class(_Step)
"""The class of the autograd node behind every output of a compiled module."""


def _written(graph: fx.Graph) -> tuple[tuple[int, int], ...]:
    specs = [meta(n).spec for n in forward_inputs(graph)]
    writes = [s.of for s, _ in results_of(graph) if isinstance(s, Mutation) and isinstance(s.of, Input)]
    return tuple((specs.index(of), of.index) for of in writes)
