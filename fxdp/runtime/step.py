"""A full step within one call: the schedule runs forward and backward, and autograd distributes gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fxdp.errors import StateError
from fxdp.ir.graph.model_tensors import full_value, shard_like
from fxdp.ir.graph.signature import Buffer, Gradient, Input, Mutation, Output, OutputSpec, Parameter
from fxdp.ir.ops.sparse_rows import sparse_gradient
from fxdp.runtime.once_differentiable import once_differentiable
from fxdp.runtime.p2p import Microbatch
from fxdp.runtime.ranges import Names, RangedStep
from fxdp.torch_compat import profiling


@dataclass
class Step:
    """The program of one rank for one kind of call with given sizes.

    Parameters
    ----------
    program : maps the full local batch to one value per entry of `results` (None: on another rank).
    results : the specs of the results.
    leaves : the model's parameters by spec.
    buffers : the model's buffers that a step changes.
    loss : the output that may be differentiated; None without a backward.
    differentiable : outputs that depend on parameters; differentiating one raises, except for `loss`.
    seed : returns the seed of a step's random numbers.
    moment : returns the number of the current call.
    handed_out : called with the number of the call whose gradients autograd distributes, to be compared
        between ranks.
    full : returns the unsharded parameters that live across steps, which the program then takes as an input.
    settled : waits until all ranks have read this rank's published shards.
    messages : the collectives that each module of the program starts, for a profiler.
    tables : the parameters with a sparse gradient, which the program returns as rows, with their sizes.
    repeated : compares the results of the first call, run twice; None afterwards, and without need.
    """

    program: fx.GraphModule
    results: tuple[OutputSpec, ...]
    leaves: dict[Parameter, Tensor]
    buffers: dict[Buffer, Tensor]
    loss: int | None
    differentiable: frozenset[int]
    seed: Callable[[], int]
    moment: Callable[[], int] = int
    handed_out: Callable[[int], None] = lambda call: None
    full: Callable[[Microbatch], Sequence[Tensor]] | None = None
    settled: Callable[[], None] = lambda: None
    messages: Mapping[str, Names] = field(default_factory=dict)
    tables: Mapping[Parameter, torch.Size] = field(default_factory=dict)
    repeated: Callable[[Sequence[OutputSpec], Sequence[Any], Sequence[Any]], None] | None = None
    _order: list[Parameter | Input] = field(init=False)
    _sharded: dict[int, DTensor] = field(init=False)
    """Sharded leaves by position in `_order`, cached as checking takes longer than distributing gradients."""

    def __post_init__(self) -> None:
        self._order = [s.of for s in self.results if isinstance(s, Gradient)]
        leaves = [self.leaves.get(of) if isinstance(of, Parameter) else None for of in self._order]
        self._sharded = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}

    takes_sizes: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False
    """False: a step is written for the sizes of its micro-batches, so a call passes no sizes or rows."""

    def run(
        self,
        inputs: Sequence[Tensor],
        _sizes: Mapping[str, int] | None = None,
        _rows: Mapping[str, Tensor] | None = None,
        _even: bool = True,
    ) -> Sequence[Tensor]:
        """Return this rank's outputs; the loss among the outputs carries the gradients of the step."""
        if self.loss is None or not torch.is_grad_enabled():
            return self._execute(inputs)[0]
        outputs, gradients = self._execute(inputs)
        leaves = [inputs[s.index] if isinstance(s, Input) else self.leaves[s] for s in self._order]
        # only leaves with a gradient on this rank: torch would call hooks of the other leaves with None
        reached = [None if g is None else leaf for leaf, g in zip(leaves, gradients, strict=True)]
        if all(leaf is None for leaf in reached):
            reached = [*leaves]  # a loss that is differentiable even without gradients here
        return _HandOut.apply(self, outputs, gradients, *reached)  # type: ignore[no-untyped-call,no-any-return]

    def _execute(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the outputs, and the gradients in the order of the leaves."""
        with torch.no_grad():
            full = Microbatch(None, tuple(t.detach().contiguous() for t in inputs), self.seed())
            given: tuple[Any, ...] = (full,) if self.full is None else (full, self.full(full))
            if profiling():
                values = RangedStep(self.program, self.messages).run(*given)
            else:
                values = self.program(*given)
            if self.repeated is not None:
                self.repeated(self.results, values, self.program(*given))
                self.repeated = None
            self.settled()
            outputs: list[Tensor] = []
            gradients: list[Tensor | None] = []
            for spec, value in zip(self.results, values, strict=True):
                if isinstance(spec, Output):
                    outputs.append(value)
                elif isinstance(spec, Gradient):
                    size = self.tables.get(spec.of) if isinstance(spec.of, Parameter) else None
                    if value is not None and size is not None:
                        value = sparse_gradient(value, size)
                    gradients.append(value)
                elif isinstance(spec, Mutation) and isinstance(spec.of, Buffer):
                    self.buffers[spec.of].copy_(value)
        return outputs, gradients

    def shards_of(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients for autograd: local shards for sharded parameters, all others unchanged."""
        sharded = list(gradients)
        for place, leaf in self._sharded.items():
            gradient = sharded[place]
            sharded[place] = gradient if gradient is None else shard_like(leaf, gradient)
        return sharded


class _HandOut(torch.autograd.Function):
    """Autograd node of the loss of a step whose gradients are already computed."""

    @staticmethod
    def forward(ctx: Any, step: Step, values: Any, gradients: Any, *leaves: Any) -> tuple[Tensor, ...]:
        # no views of received or concatenated values: a caller could not write into a view (`loss /= 4`)
        outputs = [value.detach() for value in values]
        ctx.step, ctx.gradients, ctx.call = step, gradients, step.moment()
        ctx.set_materialize_grads(False)
        known = {step.loss, *step.differentiable}
        ctx.mark_non_differentiable(*[o for i, o in enumerate(outputs) if i not in known])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step: Step = ctx.step
        wrong = [i for i, g in enumerate(grads) if g is not None and i != step.loss]
        if wrong:
            raise StateError(
                f"output {wrong[0]} of a model in stages or micro-batches was differentiated, but the "
                f"backward ran inside of the call, for output {step.loss}: the scalar named `loss`, or else "
                "the first scalar. Let the model return what is to be differentiated under that name or "
                "first, further losses added to it"
            )
        if ctx.gradients is None:
            raise StateError(
                "backward() a second time through a step in stages or micro-batches, whose gradients were "
                "handed out by the first; call the module again for another backward"
            )
        gradients, ctx.gradients = ctx.gradients, None
        step.handed_out(ctx.call)
        scale = grads[step.loss] if step.loss is not None else None
        if scale is None:
            return (None, None, None, *[None] * len(gradients))
        return (None, None, None, *once_differentiable(step.shards_of(_scaled(gradients, full_value(scale)))))


def _scaled(gradients: Sequence[Tensor | None], scale: Tensor) -> list[Tensor | None]:
    """Return the gradients times the loss's incoming gradient; not in place, as gradients may be aliases."""
    if scale.device.type == "cpu" and scale.item() == 1:
        return list(gradients)
    return [None if g is None else g * scale.to(g.dtype) for g in gradients]
