"""The arguments of an emitted part: the model's own tensors stand in them, a call fills in the rest.

slot of the part     position holds
Parameter, Buffer    the model's tensor, which a step reads as it then is; of a parameter whose rows other
                     pipeline ranks hold, what these sent
Constant             the captured tensor; of one that no capture made, the row numbers of padded gathers
Input                the caller's tensor, or a micro-batch's part of it
Size                 a number of the call
Crossing             what another part of the program gives
Tangent              nothing: the backward takes it, after what the forward saved
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.metadata import meta, tensor_type
from fxdp.ir.placements import Shard
from fxdp.ir.signature import Buffer, Constant, Input, InputSpec, Parameter, Size, StageValue, Tangent
from fxdp.lowering.eager import backward_inputs, forward_inputs

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class TangentSpec:
    """What the backward expects for one output: its number, dtype, and whether the ranks hold parts."""

    output: int
    dtype: torch.dtype
    sharded: bool


@dataclass(frozen=True)
class CallFrame:
    """The arguments of one part, in the order of its forward's inputs."""

    values: tuple[Any, ...]
    """What is known before any call; None elsewhere."""
    inputs: tuple[tuple[int, int], ...] = ()
    """Pairs of position and index among the inputs of the call."""
    sizes: tuple[tuple[int, str], ...] = ()
    """Pairs of position and name of a size."""
    rows: int | None = None
    """Position of the row numbers of padded gathers."""
    crossing: tuple[tuple[int, str], ...] = ()
    """Pairs of position and name of what another part gives."""
    tangents: tuple[TangentSpec | str, ...] = ()
    """What the backward takes after the saved values: tangents, and names of what other parts give."""

    @classmethod
    def of(cls, gm: fx.GraphModule, values: Mapping[InputSpec, Any]) -> CallFrame:
        """The arguments of an emitted graph, with the model's tensors in `values`."""
        known: list[Any] = []
        inputs: list[tuple[int, int]] = []
        sizes: list[tuple[int, str]] = []
        crossing: list[tuple[int, str]] = []
        rows = None
        for position, node in enumerate(forward_inputs(gm.graph)):
            spec, value = meta(node).spec, None
            match spec:
                case Constant() if spec not in values:
                    rows = position
                case Parameter(name) if spec not in values:
                    crossing.append((position, name))
                case Parameter() | Buffer() | Constant():
                    value = values[spec]
                case Input(index):
                    inputs.append((position, index))
                case Size(name):
                    sizes.append((position, name))
                case StageValue(name):
                    crossing.append((position, name))
            known.append(value)
        later = tuple(map(_later, backward_inputs(gm.graph)))
        return cls(tuple(known), tuple(inputs), tuple(sizes), rows, tuple(crossing), later)

    def with_numbers(self, sizes: Mapping[str, int], rows: Tensor | None) -> CallFrame:
        """The same with what is fixed for all calls of one size, so that no call fills it in."""
        values = list(self.values)
        for position, name in self.sizes:
            values[position] = sizes[name]
        if self.rows is not None:
            values[self.rows] = rows
        return replace(self, values=tuple(values), sizes=(), rows=None)

    def filled(
        self,
        inputs: Sequence[Tensor],
        sizes: Mapping[str, int] = _NOTHING,
        rows: Tensor | None = None,
        crossing: Mapping[str, Tensor] = _NOTHING,
    ) -> list[Any]:
        """The arguments of one call, in a list of its own, which the callee empties."""
        values = list(self.values)
        for position, index in self.inputs:
            values[position] = inputs[index].contiguous()
        for position, name in self.sizes:
            values[position] = sizes[name]
        if self.rows is not None:
            values[self.rows] = rows
        for position, name in self.crossing:
            # as if received: a stage of this rank hands on what it has, which may be channels last
            values[position] = crossing[name].contiguous()
        return values


def _later(node: fx.Node) -> TangentSpec | str:
    spec = meta(node).spec
    if isinstance(spec, StageValue):
        return spec.name
    assert isinstance(spec, Tangent)
    return TangentSpec(spec.index, tensor_type(node).dtype, isinstance(meta(node).placement, Shard))
