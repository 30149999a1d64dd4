"""The sizes of a call: values of the program's size inputs, and checks against the captured sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor, fx

from fxdp.capture.captured import Captured, Condition
from fxdp.errors import InputError
from fxdp.ir.graphs import inputs_of
from fxdp.ir.metadata import Location, meta
from fxdp.ir.signature import Input
from fxdp.ir.sizes import evaluate, rank_sizes
from fxdp.ir.types import TensorType
from fxdp.module.call import Call


def size_values(captured: Captured, call: Call, batches: Sequence[int], rank: int) -> dict[str, int]:
    """Return the value of each size input for this rank."""
    sizes = {**rank_sizes(batches, rank), "b_max": max(batches)}
    for name, (index, dim) in captured.symbols.items():
        sizes[name] = call.tensors[index].shape[dim]
    return sizes


def decided_error(broken: Sequence[Condition], batch: int) -> InputError:
    """Return the error for conditions on sizes that do not hold for a call of this global batch."""
    refusals = [condition.refusal for condition in broken if condition.refusal]
    if refusals:
        return InputError("\n".join(refusals))
    listing = "\n  ".join(f"{condition.expr} at {condition.location}" for condition in broken)
    return InputError(
        "the model's Python code decided on a size in a way that does not hold for this call, "
        f"whose global batch is {batch}:\n  {listing}\nUse tensor operations instead of "
        "Python conditions on sizes there, or keep the sizes within the condition"
    )


def fixed_dims(
    gm: fx.GraphModule, batch: Sequence[int | None], call: Call, values: Mapping[str, int]
) -> list[Condition]:
    """Return a condition for each size that differs from the captured size; a loop over a dim fixes sizes."""
    found = []
    for spec, node in inputs_of(gm.graph, Input):
        type_ = meta(node).type
        if not isinstance(type_, TensorType):
            continue
        sizes = zip(type_.shape, call.tensors[spec.index].shape, strict=True)
        for dim, (captured, own) in enumerate(sizes):
            if dim != batch[spec.index] and evaluate(captured, values) != own:
                found.append(Condition(sympy.false, Location(code=f"{spec.path}.shape[{dim}] == {captured}")))
    return found


def row_numbers(batches: Sequence[int]) -> Tensor:
    """Return the positions of the real rows in a buffer whose parts are padded to the largest part.

    batches (2, 0, 1) -> 0 1 . . 4 .  -> [0, 1, 4]
    """
    largest = max(batches)
    starts = [i * largest for i in range(len(batches))]
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, batches, strict=True)])
