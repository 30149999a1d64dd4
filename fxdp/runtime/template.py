"""The arguments of an emitted part: a template that holds the model's tensors, and that a call fills in.

spec of the input    argument at this position
Parameter, Buffer    the model's tensor, read in its state at the step; for a parameter sharded over other
                     pipeline ranks, the value received from these ranks
Constant             the captured tensor; without a captured tensor, the row indices of padded gathers
Input                the caller's tensor, or the slice of a micro-batch
Size                 a number of the call
StageValue           a value of another part of the program
Tangent              none: an argument of the backward, after the saved values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import (
    Buffer,
    Constant,
    Input,
    InputSpec,
    Parameter,
    Size,
    StageValue,
    Tangent,
    rows_axis,
)
from fxdp.ir.types.placements import Shard
from fxdp.lowering.eager import backward_inputs, forward_inputs
from fxdp.lowering.inductor.strides import channels_last

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class TangentSpec:
    """Specification of a backward's tangent for one output: the output's number, dtype and sharding."""

    output: int
    dtype: torch.dtype
    sharded: bool


@dataclass(frozen=True)
class CallFrame:
    """The arguments of a part, in the order of the forward's inputs."""

    values: tuple[Any, ...]
    """The values known before any call, with None at all other positions."""
    inputs: tuple[tuple[int, int], ...] = ()
    """Pairs of position and index among the inputs of the call."""
    sizes: tuple[tuple[int, str], ...] = ()
    """Pairs of position and name of a size."""
    rows: tuple[tuple[int, str], ...] = ()
    """Pairs of position and axis of the row indices of padded gathers."""
    crossing: tuple[tuple[int, str], ...] = ()
    """Pairs of position and name of a value from another part."""
    images: tuple[tuple[int, str], ...] = ()
    """Pairs of position and name of a value from another part that is taken channels-last."""
    tangents: tuple[TangentSpec | str, ...] = ()
    """The backward's arguments after the saved values: tangents, and names of values from other parts."""

    @classmethod
    def of(
        cls, gm: fx.GraphModule, values: Mapping[InputSpec, Any], images: frozenset[str] = frozenset()
    ) -> CallFrame:
        """Return the template of an emitted graph, with the model's tensors from `values`.

        `images` are the names of values of other parts that are taken channels-last, all others as rows.
        """
        known: list[Any] = []
        inputs: list[tuple[int, int]] = []
        sizes: list[tuple[int, str]] = []
        crossing: list[tuple[int, str]] = []
        laid_out: list[tuple[int, str]] = []
        rows: list[tuple[int, str]] = []
        for position, node in enumerate(forward_inputs(gm.graph)):
            spec, value = meta(node).spec, None
            match spec:
                case Constant(name) if spec not in values:
                    rows.append((position, rows_axis(name)))
                case Parameter(name) if spec not in values:
                    crossing.append((position, name))
                case Parameter() | Buffer() | Constant():
                    value = values[spec]
                case Input(index):
                    inputs.append((position, index))
                case Size(name):
                    sizes.append((position, name))
                case StageValue(name):
                    (laid_out if name in images else crossing).append((position, name))
            known.append(value)
        later = tuple(map(_later, backward_inputs(gm.graph)))
        return cls(
            tuple(known), tuple(inputs), tuple(sizes), tuple(rows), tuple(crossing), tuple(laid_out), later
        )

    def with_numbers(self, sizes: Mapping[str, int], rows: Mapping[str, Tensor]) -> CallFrame:
        """Return a template with all values that are fixed for calls of one size filled in."""
        values = list(self.values)
        for position, name in self.sizes:
            values[position] = sizes[name]
        for position, name in self.rows:
            values[position] = rows[name]
        return replace(self, values=tuple(values), sizes=(), rows=())

    def filled(
        self,
        inputs: Sequence[Tensor],
        sizes: Mapping[str, int] = _NOTHING,
        rows: Mapping[str, Tensor] = _NOTHING,
        crossing: Mapping[str, int | Tensor | tuple[Tensor, ...]] = _NOTHING,
        *,
        strided: bool = False,
    ) -> list[Any]:
        """Return the arguments of a call, in a new list, which the callee empties.

        With `strided` values of other parts keep their strides, as if no part ended there.
        """
        values = list(self.values)
        for position, index in self.inputs:
            values[position] = inputs[index].contiguous()
        for position, name in self.sizes:
            values[position] = sizes[name]
        for position, name in self.rows:
            values[position] = rows[name]
        for position, name in self.crossing:
            # as on each rank, on which the part that makes the value may be another's
            value = crossing[name]
            if isinstance(value, tuple):  # the roots of a sum over blocks
                values[position] = tuple(root.contiguous() for root in value)
            else:  # or the number of rows that a mask selects
                values[position] = value.contiguous() if isinstance(value, Tensor) and not strided else value
        for position, name in self.images:
            image = crossing[name]
            assert isinstance(image, Tensor)
            values[position] = channels_last(image)
        return values


def _later(node: fx.Node) -> TangentSpec | str:
    spec = meta(node).spec
    if isinstance(spec, StageValue):
        return spec.name
    assert isinstance(spec, Tangent)
    return TangentSpec(spec.index, tensor_type(node).dtype, isinstance(meta(node).placement, Shard))
