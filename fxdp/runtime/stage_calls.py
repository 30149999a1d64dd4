"""The callables of a staged program: a part, lowered for given sizes and bound to the model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fxdp.ir.graph.draws import own_generator, part_seed
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.runtime.p2p import Microbatch
from fxdp.runtime.streams import COMPUTE, Streams
from fxdp.runtime.template import CallFrame


@dataclass
class Code:
    """A part lowered for one set of sizes."""

    pair: ForwardBackward
    template: CallFrame
    takes: tuple[str, ...] = ()
    """The names of the values that other parts pass to the forward, in the order of the call's arguments."""
    takes_back: tuple[str, ...] = ()
    """The names of the values that other parts pass to the backward, in the order of the call's arguments."""
    seed: tuple[int, int] | None = None
    """The numbers of part and micro-batch that seed random ops; None without random ops."""
    first: tuple[int, ...] = ()
    """The results of the first graph of a split backward; empty if not split."""
    keeps_strides: bool = False
    """True if forward and backward take values of other parts with the strides that they have there."""

    def forward(self, batch: Microbatch, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the part's results, followed by everything that the backward needs, as one tuple."""
        crossing = dict(zip(self.takes, values, strict=True))
        arguments = self.template.filled(batch.inputs, crossing=crossing, strided=self.keeps_strides)
        with self._generator(batch):
            results = self.pair.forward(arguments)
        count = self.pair.outputs
        return (*results[:count], (self, list(results[count:])))

    def backward_arguments(self, saved: list[Any], values: Sequence[Tensor]) -> list[Any]:
        """Return the saved values (emptying `saved`), then the tangent of the loss or values from stages."""
        arguments = [saved[i] for i in self.pair.saved_order]
        saved.clear()
        sent = dict(zip(self.takes_back, values, strict=True))
        for tangent in self.template.tangents:
            if isinstance(tangent, str):
                arguments.append(sent[tangent] if self.keeps_strides else sent[tangent].contiguous())
            else:
                device = next((v.device for v in self.template.values if isinstance(v, Tensor)), None)
                arguments.append(torch.ones((), dtype=tangent.dtype, device=device))
        return arguments

    def _generator(self, batch: Microbatch) -> AbstractContextManager[None]:
        """Return a context that seeds random ops by stage, rank and micro-batch, for a repeatable forward."""
        if self.seed is None:
            return nullcontext()
        return own_generator(part_seed(batch.seed, *self.seed))


_Saved: TypeAlias = tuple[Code, list[Any]]
"""Saved values for the second callable of a part, with the code that computed the values."""


class StepModule(nn.Module):
    """A function as a module of the step, without the model's tensors as parameters of this module."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = run


def forward(codes: Mapping[int | None, Code]) -> StepModule:
    """Return a part's forward for any micro-batch: `(micro-batch, *values) -> (*results, saved)`."""
    return StepModule(lambda batch, *values: codes[batch.index].forward(batch, values))


def once(code: Code, streams: Streams) -> StepModule:
    """Return a part without backward, run once per step: `(full batch, *values) -> results`, on `stream`."""

    def run(batch: Microbatch, *values: Tensor, stream: str = COMPUTE) -> tuple[Tensor, ...]:
        with streams.on(stream):
            return code.forward(batch, values)[:-1]

    return StepModule(run)


def backward(saved: _Saved, sums: Sequence[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
    """Run a part's full backward; return the results, except results that are added to `sums`."""
    code, kept = saved
    arguments = code.backward_arguments(kept, values)
    arguments += sums
    return tuple(code.pair.backward(frozenset()).run(arguments))


def input_gradient(saved: _Saved, *values: Tensor) -> tuple[Any, ...]:
    """Run the first graph of a split backward; return the gradients that earlier stages need, and `rest`."""
    code, kept = saved
    run, _ = code.pair.halved(code.first)
    results, count = run(code.backward_arguments(kept, values)), len(code.first)
    return (*results[:count], (code, list(results[count:])))


def weight_gradient(rest: _Saved, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the second graph of a split backward; return all results that are not added to `sums`."""
    code, arguments = rest
    _, run = code.pair.halved(code.first)
    arguments += sums
    return tuple(run(arguments))
