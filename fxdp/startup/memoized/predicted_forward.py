"""Trace a joint graph with forward metadata predicted from the exported graph, to skip the metadata run.

    torch:  a run on fake tensors      results that need a tangent, aliases, mutated inputs
            a run under the tracer     the joint graph, structured by this metadata
    here:   read from the graph        tensors like the results, a write into each mutated buffer
            a run under the tracer     compared with the prediction; on a mismatch torch makes both runs

The metadata run takes a fifth of the time of a trace. The prediction need not be correct for all models,
since the second run verifies the prediction completely; it should be correct for most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.capture.export.exported import Exported
from fxdp.capture.export.loop_iterations import writes_of
from fxdp.capture.joint.raw_joint import Decompositions, Differentiated, JointOptions, Traced, traced
from fxdp.ir.graph.graphs import attribute_of, given_arguments
from fxdp.torch_compat import (
    REGIONS,
    FunctionalTensor,
    OpOverload,
    aten,
    is_on,
    is_traced,
    storage_id,
    written_value,
)

_log = logging.getLogger("fxdp")


def predicted_trace(
    own: Callable[[Exported, JointOptions, Decompositions], Traced],
    exported: Exported,
    options: JointOptions,
    table: Decompositions,
) -> Traced:
    """Extend `differentiated`: trace once, with predicted metadata; the own way where a prediction fails."""
    if is_on("predicted_forward") and (told := _predict(exported.gm)) is not None:
        wrapper = _Predicted(exported.gm, options.differentiable, exported.loss, told)
        try:
            return traced(wrapper, exported, table)
        except Exception as error:  # whatever it is, the prediction may be its cause
            _log.debug("the forward runs before it is traced: %r", error)
    return own(exported, options, table)


class _Predicted(Differentiated):
    """A module whose first run, before the trace, gives what is predicted of it."""

    def __init__(
        self, exported: fx.GraphModule, differentiable: str, loss: int | None, told: _PredictedForward
    ) -> None:
        super().__init__(exported, differentiable, loss)
        self.told = told
        self.forward_metadata: _ForwardMetadata = ()

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the outputs, and compare both runs.

        Raises
        ------
        _WrongPredictionError : the traced outputs differ from the predicted ones.
        """
        outputs = super().forward(*tensors)
        found = _forward_metadata(outputs, (*tensors, *self._tensors()))
        if is_traced() and found != self.forward_metadata:
            raise _WrongPredictionError(f"expected {self.forward_metadata}, got {found}")
        self.forward_metadata = found
        return outputs

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the exported program under a trace; before one, give the predicted outputs."""
        return super().run(tensors) if is_traced() else self.told.run(self.exported, tensors)

    def _tensors(self) -> Iterator[Tensor]:
        """All parameters and buffers, a tied one by each of its names."""
        for named in (self.named_parameters, self.named_buffers):
            yield from (tensor for _, tensor in named(remove_duplicate=False))


_ForwardMetadata: TypeAlias = tuple[Any, ...]

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


class _WrongPredictionError(Exception):
    """A prediction of a forward's metadata does not hold."""


@dataclass(frozen=True)
class _PredictedForward:
    """Predicted metadata of a forward graph."""

    results: tuple[tuple[Tensor, bool], ...]
    """For each result an example value, and whether the result requires a gradient."""
    written: tuple[fx.Node, ...]
    """The attributes and inputs that the forward writes in place."""

    def run(self, gm: fx.GraphModule, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors like the forward's results, after a write into each mutated tensor.

        Raises
        ------
        _WrongPredictionError : a mutated tensor is a real one, not wrapped by the trace.
        """
        inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True))
        for node in self.written:
            given = inputs[node] if node in inputs else attribute_of(gm, node)
            if not isinstance(given, FunctionalTensor):
                raise _WrongPredictionError(f"{node.name} would be written")
            given.zero_()
        return [_like(value).requires_grad_(gradient) for value, gradient in self.results]


def _predict(gm: fx.GraphModule) -> _PredictedForward | None:
    """Predict from a graph; None if only a run can tell: data-dependent sizes, or a value is unknown."""
    results: Any = gm.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)):
        return None
    gradients = _with_gradients(gm)
    found: list[tuple[Tensor, bool]] = []
    for node in results:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor):
            return None
        found.append((value, node in gradients))
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]  # regions have theirs
    if any("unbacked_bindings" in node.meta for graph in graphs for node in graph.nodes):
        return None
    written = tuple(node for node in _written(gm) if isinstance(_given(gm, node), Tensor))
    return _PredictedForward(tuple(found), written)


def _forward_metadata(results: Sequence[Tensor], given: Iterable[Tensor]) -> _ForwardMetadata:
    """Return the metadata that torch collects in a run: properties of results, and mutations of `given`.

    Raises
    ------
    _WrongPredictionError : a result shares memory with another result or with `given`.
    """
    taken = [tensor for tensor in given if isinstance(tensor, FunctionalTensor)]
    own = {storage_id(tensor) for tensor in results}.difference(map(storage_id, taken))
    if len(own) < len(results):
        raise _WrongPredictionError("a result lies in the memory of another value")
    return tuple(map(_kind, results)), tuple(map(_kind, taken))


def _kind(tensor: Any) -> tuple[Any, ...]:
    value, written = written_value(tensor)
    # the storage offset matters for tangents only: a view of an inner value is as good as a copy
    begin = value.storage_offset() if tensor.requires_grad else None
    lies = (*value.shape, None, *value.stride(), begin)
    # equal expressions are one object; comparing the sizes themselves would add a guard
    sizes = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in lies)
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, bits, written, sizes


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _given(gm: fx.GraphModule, node: fx.Node) -> Any:
    """Return the tensor that the forward takes from outside under this node; None for results of ops."""
    if node.op == "get_attr":
        return attribute_of(gm, node)
    return node.meta.get("val") if node.op == "placeholder" else None


def _with_gradients(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the values that require gradients.

    All ops count as differentiable except `detach`, and regions of `torch.no_grad()`.
    """
    found: set[fx.Node] = set()
    for node in gm.graph.nodes if torch.is_grad_enabled() else ():
        value = _given(gm, node) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        goes = getattr(value, "requires_grad", False) or found.intersection(node.all_input_nodes)
        stops = node.target is aten.detach.default or (
            node.target in REGIONS and node.args[0] is False  # for autocast the first argument is the device
        )
        if goes and not stops:
            found.add(node)
    return found


def _written(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """Return the nodes that the graph mutates: by ops with mutable schemas, or batch norms in training."""
    found: dict[fx.Node, None] = dict.fromkeys(writes_of(gm, own_sums=True))
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and "_norm" in str(node.target):
            given = given_arguments(node)
            if any(given.get(name) for name in _TRAINING):
                written = [given.get(name) for name in _STATISTICS]
                found |= {root: None for root in written if isinstance(root, fx.Node)}
    return found
