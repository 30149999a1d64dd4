"""The callables of a staged program: a part, lowered for sizes and bound to the model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fxdp.ir.draws import own_generator, part_seed
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
    """What other parts give its forward, by name, in the order in which a call has it."""
    takes_back: tuple[str, ...] = ()
    """The same of its backward."""
    seed: int | None = None
    """Set where the part draws random numbers: differs between stages and ranks."""
    first: tuple[int, ...] = ()
    """The results of its backward's first half, where that runs in two."""

    def forward(self, batch: Microbatch, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The part's results, and after them everything that its backward needs, as one tuple."""
        crossing = dict(zip(self.takes, values, strict=True))
        arguments = self.template.filled(batch.inputs, crossing=crossing)
        with self._generator(batch):
            results = self.pair.forward(arguments)
        count = self.pair.outputs
        return (*results[:count], (self, list(results[count:])))

    def backward_arguments(self, saved: list[Any], values: Sequence[Tensor]) -> list[Any]:
        """What was saved, which is let go of, then the loss's tangent or what other stages sent."""
        arguments = [saved[i] for i in self.pair.saved_order]
        saved.clear()
        sent = dict(zip(self.takes_back, values, strict=True))
        for tangent in self.template.tangents:
            if isinstance(tangent, str):
                arguments.append(sent[tangent].contiguous())
            else:
                device = next((v.device for v in self.template.values if isinstance(v, Tensor)), None)
                arguments.append(torch.ones((), dtype=tangent.dtype, device=device))
        return arguments

    def _generator(self, batch: Microbatch) -> AbstractContextManager[None]:
        """Numbers of this stage's, rank's and micro-batch's own, the same in a repeated forward."""
        if self.seed is None:
            return nullcontext()
        return own_generator(part_seed(batch.seed, self.seed, batch.index or 0))


Saved: TypeAlias = tuple[Code, list[Any]]
"""What one half of a part hands to the other, with the code that made it."""


class StepModule(nn.Module):
    """A function as one of the modules of a step, to which the model's tensors in it are none of its own."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = run


def forward(codes: Mapping[int | None, Code]) -> StepModule:
    """A part's forward by the number of the micro-batch: `(micro-batch, *values) -> (*results, saved)`."""
    return StepModule(lambda batch, *values: codes[batch.index].forward(batch, values))


def once(code: Code, streams: Streams) -> StepModule:
    """A part without backward that runs once per step: `(global batch, *values) -> results`, on `stream`."""

    def run(batch: Microbatch, *values: Tensor, stream: str = COMPUTE) -> tuple[Tensor, ...]:
        with streams.on(stream):
            return code.forward(batch, values)[:-1]

    return StepModule(run)


def backward(saved: Saved, sums: Sequence[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
    """A part's entire backward: its results, those aside that it adds to `sums`."""
    code, kept = saved
    arguments = code.backward_arguments(kept, values)
    arguments += sums
    return tuple(code.pair.backward(frozenset()).run(arguments))


def input_gradient(saved: Saved, *values: Tensor) -> tuple[Any, ...]:
    """The first half: what earlier stages wait for, and `rest`, which the second half needs."""
    code, kept = saved
    run, _ = code.pair.halved(code.first)
    results, count = run(code.backward_arguments(kept, values)), len(code.first)
    return (*results[:count], (code, list(results[count:])))


def weight_gradient(rest: Saved, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The second half: its results, those aside that it adds to `sums`."""
    code, arguments = rest
    _, run = code.pair.halved(code.first)
    arguments += sums
    return tuple(run(arguments))
