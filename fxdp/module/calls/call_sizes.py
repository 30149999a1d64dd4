"""The sizes of a call: values of the program's size inputs, and checks against the captured sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxdp.capture.captured import Captured, Condition
from fxdp.compiler.program import Program
from fxdp.errors import InputError
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.sizes import B, axis, by_axis, evaluate, named_size, rank_sizes
from fxdp.ir.types.value_types import TensorType
from fxdp.module.cache import LRU
from fxdp.module.calls.call import Call

_ROWS = 256  # sizes of calls whose row numbers are cached


@dataclass(frozen=True, slots=True)
class CallSizes:
    """The sizes of a call, without its tensors."""

    batches: tuple[int, ...]
    """The batch size of each data rank; a `Split` of a ragged batch."""
    dims: tuple[tuple[int, ...], ...]
    """All sizes of this rank's tensors but the batch."""
    shapes: tuple[torch.Size, ...]
    """The shapes of this rank's tensors."""
    rank: int
    """The index of this rank among the data ranks."""
    device: torch.device | None
    """The device of the tensors; None without any."""

    @classmethod
    def of(cls, call: Call, batches: tuple[int, ...], rank: int) -> CallSizes:
        """Return the sizes of a call."""
        tensors = call.inputs.tensors
        shapes = tuple(tensor.shape for tensor in tensors)
        return cls(batches, call.dims, shapes, rank, tensors[0].device if tensors else None)

    @property
    def batch(self) -> int:
        """The size of the global batch."""
        return sum(self.batches)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of executables for these sizes; equal on all ranks."""
        return self.dims, self.batches

    def values(self, captured: Captured) -> dict[str, int]:
        """Return the value of each size input for this rank."""
        sizes = rank_sizes(self.batches, self.rank)
        sizes |= {axis(name).largest: max(of_ranks) for name, of_ranks in by_axis(self.batches).items()}
        for name, (index, dim) in captured.symbols.items():
            sizes[name] = self.shapes[index][dim]
        return sizes

    def broken(self, program: Program) -> list[Condition]:
        """Return the conditions of a program that these sizes do not fulfil."""
        values = self.values(program.captured)
        sizes = {named_size(name): value for name, value in values.items()}
        conditions = [
            *program.captured.conditions,
            *self._fixed_dims(program.gm, program.captured.batch, values),
            *_few_samples(program),
        ]
        return [condition for condition in conditions if not condition.holds(sizes)]

    def _fixed_dims(
        self, gm: fx.GraphModule, batch: Sequence[int | None], values: Mapping[str, int]
    ) -> Iterator[Condition]:
        """Yield a condition for each size that differs from the captured size; a loop over a dim fixes it."""
        for spec, node in inputs_of(gm.graph, Input):
            type_ = meta(node).type
            if not isinstance(type_, TensorType):
                continue
            sizes = zip(type_.shape, self.shapes[spec.index], strict=True)
            for dim, (captured, own) in enumerate(sizes):
                if dim != batch[spec.index] and evaluate(captured, values) != own:
                    place = Location(code=f"{spec.path}.shape[{dim}] == {captured}")
                    yield Condition(sympy.false, place)


def _few_samples(program: Program) -> list[Condition]:
    """Return the limit on the batch up to which the program's collectives are the cheapest, if any."""
    most = program.most_samples
    return [] if most is None else [Condition(most >= B, Location())]


def decided_error(broken: Sequence[Condition], batch: int) -> InputError:
    """Return the error for conditions on sizes that do not hold for a call of this global batch."""
    refusals = [condition.refusal for condition in broken if condition.refusal]
    if refusals:
        return InputError("\n".join(refusals))
    listing = "\n  ".join(f"{condition.expr} at {condition.location}" for condition in broken)
    return InputError(
        "the model's Python code decided on a size in a way that does not hold for this call, "
        f"whose global batch is {batch}:\n  {listing}\nUse tensor operations instead of "
        "Python conditions on sizes there, or keep the sizes within the condition; "
        "fxdp.compile(..., fallback='eager') runs such calls op by op"
    )


def _row_numbers(batches: Sequence[int]) -> Tensor:
    """Return the positions of the real rows in a buffer whose parts are padded to the largest part.

    batches (2, 0, 1) -> 0 1 . . 4 .  -> [0, 1, 4]
    """
    largest = max(batches)
    starts = [i * largest for i in range(len(batches))]
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, batches, strict=True)])


class RowNumbers:
    """The row numbers of padded gathers, cached by batch sizes and device."""

    def __init__(self) -> None:
        self._known: LRU[Any, dict[str, Tensor]] = LRU(_ROWS)

    def of(self, sizes: CallSizes) -> dict[str, Tensor]:
        """Return the row numbers of each axis, by name, on the device of a call."""
        key = sizes.batches, sizes.device
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = {
                name: _row_numbers(of_ranks).to(sizes.device)
                for name, of_ranks in by_axis(sizes.batches).items()
            }
        return found
