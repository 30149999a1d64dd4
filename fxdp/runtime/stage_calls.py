"""The callables of a staged program: a part, lowered for sizes and bound to the model's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.ir.draws import own_generator, part_seed
from fxdp.lowering.halves import Boxed, Halves
from fxdp.runtime.p2p import Microbatch
from fxdp.runtime.streams import COMPUTE, Streams
from fxdp.runtime.template import Template


@dataclass
class Code:
    """A part lowered for one set of sizes."""

    halves: Halves
    template: Template
    seed: int | None = None
    """Set where the part draws random numbers: differs between stages and ranks."""
    input_half: Boxed | None = None
    weight_half: Boxed | None = None

    def forward(self, batch: Microbatch, values: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """The part's results, and after them everything that its backward needs, as one tuple."""
        arguments = self.template.filled(batch.inputs, crossing=values)
        with self._generator(batch):
            results = self.halves.forward(arguments)
        count = self.halves.outputs
        return (*results[:count], (self, list(results[count:])))

    def backward_arguments(self, saved: list[Any], values: Mapping[str, Tensor]) -> list[Any]:
        """The backward's inputs: what was saved, then the loss's tangent or what other stages sent."""
        arguments = [saved[i] for i in self.halves.saved_order]
        for tangent in self.template.tangents:
            if isinstance(tangent, str):
                arguments.append(values[tangent].contiguous())
            else:
                device = next((v.device for v in self.template.values if isinstance(v, Tensor)), None)
                arguments.append(torch.ones((), dtype=tangent.dtype, device=device))
        return arguments

    @property
    def backward(self) -> Boxed:
        """The whole backward; of a stage that has none, nothing."""
        return self.halves.backward(frozenset()).run if self.halves.trains else _nothing

    def halve(self, first: tuple[int, ...]) -> None:
        """Cut the backward in two: the results numbered `first`, then the others."""
        self.input_half = self.weight_half = _nothing
        if self.halves.trains:
            self.input_half, self.weight_half = self.halves.halved(first)

    def _generator(self, batch: Microbatch) -> AbstractContextManager[None]:
        """Numbers of this stage's, rank's and micro-batch's own, the same in a repeated forward."""
        if self.seed is None:
            return nullcontext()
        return own_generator(part_seed(batch.seed, self.seed, batch.index or 0))


def _nothing(_: list[Any]) -> tuple[()]:
    return ()


class _Call(nn.Module):
    """A part's code by the number of the micro-batch; keeps the model's tensors out of nn.Module's sight."""

    def __init__(self, codes: Mapping[int | None, Code], names: Sequence[str]) -> None:
        super().__init__()
        object.__setattr__(self, "codes", dict(codes))
        self.names = tuple(names)

    codes: dict[int | None, Code]


class Forward(_Call):
    """A part's forward: `(micro-batch, *values from other parts) -> (*results, saved)`."""

    def forward(self, batch: Microbatch, *values: Tensor) -> tuple[Any, ...]:
        """Run it."""
        return self.codes[batch.index].forward(batch, dict(zip(self.names, values, strict=True)))


class Once(_Call):
    """A part without backward that runs once per step: `(whole batch, *values) -> results`."""

    def __init__(self, code: Code, names: Sequence[str], streams: Streams) -> None:
        super().__init__({None: code}, names)
        self._streams = streams

    def forward(self, batch: Microbatch, *values: Tensor, stream: str = COMPUTE) -> tuple[Tensor, ...]:
        """Run it on `stream`."""
        with self._streams.on(stream):
            code = self.codes[None]
            return tuple(code.forward(batch, dict(zip(self.names, values, strict=True)))[:-1])


class HeldRows(nn.Module):
    """This rank's rows of sharded parameters, which the stages of other pipeline ranks read, too."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "_rows", tuple(rows))

    _rows: tuple[Tensor, ...]

    def forward(self) -> tuple[Tensor, ...]:
        """As they are now."""
        return self._rows


class Backward(_Call):
    """A part's whole backward: `(saved, sums, *values) -> results`, those aside that it adds to `sums`."""

    def forward(
        self, saved: tuple[Code, list[Any]], sums: tuple[Tensor, ...], *values: Tensor
    ) -> tuple[Tensor, ...]:
        """Run it; what was saved is let go of."""
        code, kept = saved
        arguments = code.backward_arguments(kept, dict(zip(self.names, values, strict=True)))
        kept.clear()
        arguments += sums
        return tuple(code.backward(arguments))


class InputGradient(_Call):
    """The first half of a backward: `(saved, *values) -> (*what earlier stages wait for, rest)`."""

    def __init__(self, codes: Mapping[int | None, Code], names: Sequence[str], results: int) -> None:
        super().__init__(codes, names)
        self.results = results

    def forward(self, saved: tuple[Code, list[Any]], *values: Tensor) -> tuple[Any, ...]:
        """Run it; `rest` is what the second half needs."""
        code, kept = saved
        assert code.input_half is not None
        arguments = code.backward_arguments(kept, dict(zip(self.names, values, strict=True)))
        kept.clear()
        results = code.input_half(arguments)
        return (*results[: self.results], (code, list(results[self.results :])))


class WeightGradient(nn.Module):
    """The second half of a backward: `(rest, sums) -> results`, those aside that it adds to `sums`."""

    def forward(self, rest: tuple[Code, list[Any]], sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run it."""
        code, arguments = rest
        assert code.weight_half is not None
        arguments += sums
        return tuple(code.weight_half(arguments))


class Sums(nn.Module):
    """Buffers of zeros for what the micro-batches of a stage add up; the step's own."""

    def __init__(self, types: Sequence[tuple[list[int], torch.dtype]], device: torch.device) -> None:
        super().__init__()
        self._types = tuple(types)
        self._device = device

    def forward(self) -> tuple[Tensor, ...]:
        """New ones."""
        return tuple(torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in self._types)
