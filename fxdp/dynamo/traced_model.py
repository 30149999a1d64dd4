"""`TracedModel`: a module made of graphs traced by Dynamo, to be captured like a user's own code.

    Dynamo's graph  --  dynamo_graph.py  -->  TracedGraph  --  TracedModel  -->  capture

A graph was traced for the sizes of one rank, and the traced code may have evaluated conditions on sizes
(`if len(x) > 4`). Here sizes are read from the inputs, so that they become sizes of the global batch, and
each evaluated condition becomes a condition that the global sizes must fulfill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import sympy
from torch import Tensor, fx, nn

from fxdp.capture.captured import Captured, Condition
from fxdp.capture.inputs import Inputs
from fxdp.capture.request import Guarded
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import Location, tensor_type
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.sizes import B
from fxdp.torch_compat.dynamo import run_traced


class GraphOperand(NamedTuple):
    """The meaning of an input of a traced graph."""

    kind: str
    """`"model"`: parameter or buffer; `"constant"`: other tensor; `"input"`: argument of a call."""
    name: str
    value: Any = None
    """For a constant, the tensor."""


@dataclass(frozen=True)
class SizeGuard:
    """A condition on sizes, evaluated during the trace of a graph; true for the sizes of one rank."""

    expr: sympy.Basic
    places: Mapping[sympy.Symbol, tuple[str, int]]
    """For each symbol, an input and the dim that has this size."""
    location: Location


@dataclass(frozen=True)
class TracedGraph:
    """A forward graph traced by Dynamo, with a tuple as result; sizes are read from the inputs."""

    gm: fx.GraphModule
    operands: tuple[GraphOperand, ...]
    """The operand of each placeholder."""
    guards: tuple[SizeGuard, ...]
    lines: tuple[str, ...]
    """Text of the graph, equal on all ranks."""

    @cached_property
    def key(self) -> str:
        """Return a name that is equal for graphs that compute the same."""
        return "graph " + hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]


class _Graphs:
    """Graphs by keys; a separate object, so that guards on the model's attributes see one object only."""

    def __init__(self) -> None:
        self.known: dict[str, TracedGraph] = {}


class _Part(nn.Module):
    """A container for the parameters and buffers of one submodule of the user's model."""


class TracedModel(Guarded):
    """A module that runs one of its graphs: the graph whose key is among the keywords of a call.

    The other keywords are the inputs of the graph. Parameters and buffers are the user's own tensors, with
    the names from the user's model.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._graphs = _Graphs()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            part: nn.Module = self
            for step in path:  # not by add_module, which refuses names of nn.Module's attributes
                part = part._modules.setdefault(step, _Part())  # type: ignore[assignment]
            registry = part._parameters if isinstance(tensor, nn.Parameter) else part._buffers
            registry[last] = tensor  # type: ignore[assignment]

    def add(self, graph: TracedGraph) -> None:
        """Add a graph, unless a graph with the same key is known."""
        self._graphs.known.setdefault(graph.key, graph)

    def forward(self, **inputs: Any) -> tuple[Any, ...]:
        """Run the graph whose key is among the keywords, and return its results."""
        graph = self._asked(inputs)
        values = [self._value(operand, inputs) for operand in graph.operands]
        return tuple(run_traced(graph.gm, *values))

    def _asked(self, inputs: Iterable[str]) -> TracedGraph:
        return next(self._graphs.known[name] for name in inputs if name in self._graphs.known)

    def _value(self, operand: GraphOperand, inputs: Mapping[str, Any]) -> Any:
        if operand.kind == "input":
            return inputs[operand.name]
        if operand.kind == "constant":
            return operand.value
        *path, last = operand.name.split(".")
        part: nn.Module = self
        for step in path:
            part = part._modules[step]  # type: ignore[assignment]
        return part._parameters[last] if last in part._parameters else part._buffers[last]

    def with_guards(self, captured: Captured, inputs: Inputs) -> Captured:
        """Return the capture of a call with the guards of the graph's trace added to the conditions."""
        graph = self._asked(inputs.rebuild(inputs.tensors)[1])
        found = [_condition(guard, _sizes_of(captured)) for guard in graph.guards]
        asked = (c for c in found if c is not None)
        return replace(captured, conditions=(*captured.conditions, *asked, _SEVERAL))


_SEVERAL = Condition(
    sympy.Ne(B, 1),
    Location(),
    "torch.compile traces batch sizes of at least 2, and tells no backend what the model's code asks that "
    "one sample alone answers in another way (`if x.size(0) != 1`); got a global batch of 1 sample, expected "
    "at least 2. Use fxdp.compile(model), which knows these lines, or drop such a batch (drop_last=True)",
)


def _sizes_of(captured: Captured) -> dict[str, tuple[Any, ...]]:
    """Return the global sizes of each input, by the input's name in errors."""
    return {spec.path: tensor_type(node).shape for spec, node in inputs_of(captured.gm.graph, Input)}


def _condition(guard: SizeGuard, sizes: Mapping[str, tuple[Any, ...]]) -> Condition | None:
    expr = guard.expr.xreplace(
        {symbol: sympy.sympify(sizes[name][dim]) for symbol, (name, dim) in guard.places.items()}
    )
    if expr == sympy.true:
        return None
    asked = guard.expr.xreplace(
        {symbol: sympy.Symbol(f"{name}.size({dim})") for symbol, (name, dim) in guard.places.items()}
    )
    words = (
        f"torch.compile traced the model for this rank's part of the batch, for which {asked} held at "
        f"{guard.location}; the global batch does not fulfil it, and one device would go another way. Use "
        "fxdp.compile(model), which traces the model for the global batch, or tensor operations instead of "
        "Python conditions on sizes there"
    )
    return Condition(expr, guard.location, words)
