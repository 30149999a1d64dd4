"""What torch asks of a forward before it traces it, answered by the exported graph instead of a run.

    torch:  a run on fake tensors      which results need a tangent, who lies in whose memory, what is written
            a run under the tracer     the joint graph, laid out by that
    here:   what the graph says        tensors like its results, a write into each buffer that it writes
            a run under the tracer     compared with that; where it differs, both runs are made after all

The first run takes a fifth of the time of a trace. What is foretold need not be right, as all of it is
compared: it should be right of most models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.capture.export.loop_iterations import writes_of
from fxdp.ir.graphs import attribute_of, given_arguments
from fxdp.torch_compat import REGIONS, FunctionalTensor, OpOverload, aten, written_value

ForwardMetadata: TypeAlias = tuple[Any, ...]

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


class WrongPredictionError(Exception):
    """A forward is not what was foretold of it."""


@dataclass(frozen=True)
class PredictedForward:
    """What a graph says of the forward that it is."""

    results: tuple[tuple[Tensor, bool], ...]
    """A value of the kind of each result, and whether gradients go through it."""
    written: tuple[fx.Node, ...]
    """The attributes and inputs that it writes in place."""

    def run(self, gm: fx.GraphModule, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New tensors like the results of the forward, after a write into all that it writes.

        Raises
        ------
        WrongPredictionError : it writes into a tensor that is none of the trace's own, and has values.
        """
        inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True))
        for node in self.written:
            given = inputs[node] if node in inputs else attribute_of(gm, node)
            if not isinstance(given, FunctionalTensor):
                raise WrongPredictionError(f"{node.name} would be written")
            given.zero_()
        return [_like(value).requires_grad_(gradient) for value, gradient in self.results]


def predicted_forward(gm: fx.GraphModule) -> PredictedForward | None:
    """What the graph says; None where only a run can: the data decide sizes, or a value is not known."""
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
    if any("unbacked_bindings" in node.meta for node in gm.graph.nodes):
        return None
    written = tuple(node for node in _written(gm) if isinstance(_given(gm, node), Tensor))
    return PredictedForward(tuple(found), written)


def forward_metadata(results: Sequence[Tensor], given: Iterable[Tensor]) -> ForwardMetadata:
    """All that torch looks for in a run: the kinds of its results, and what it has written of the given.

    Raises
    ------
    WrongPredictionError : a result lies in the memory of another or of what is given, which none is foretold
    to.
    """
    taken = [tensor for tensor in given if isinstance(tensor, FunctionalTensor)]
    own = {_memory(tensor) for tensor in results}.difference(map(_memory, taken))
    if len(own) < len(results):
        raise WrongPredictionError("a result lies in the memory of another value")
    return tuple(map(_kind, results)), tuple(map(_kind, taken))


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _kind(tensor: Any) -> tuple[Any, ...]:
    value, written = written_value(tensor)
    # where a value begins is asked of a tangent alone: a view of an inner value is as good as a copy
    begin = value.storage_offset() if tensor.requires_grad else None
    lies = (*value.shape, None, *value.stride(), begin)
    # two expressions that are equal are one object; to compare the sizes would be a guard
    sizes = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in lies)
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, bits, written, sizes


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _given(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What is given to the forward under this node; None of what an op makes."""
    if node.op == "get_attr":
        return attribute_of(gm, node)
    return node.meta.get("val") if node.op == "placeholder" else None


def _with_gradients(gm: fx.GraphModule) -> set[fx.Node]:
    """The values through which gradients go, if all have a derivative but `detach` and `torch.no_grad()`."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes if torch.is_grad_enabled() else ():
        value = _given(gm, node) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        goes = getattr(value, "requires_grad", False) or found.intersection(node.all_input_nodes)
        stops = node.target is aten.detach.default or (
            node.target in REGIONS and node.args[0] is False  # of autocast it is the device
        )
        if goes and not stops:
            found.add(node)
    return found


def _written(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """In what the graph writes: by ops that say so, and by batch norms in training."""
    found: dict[fx.Node, None] = dict.fromkeys(writes_of(gm, own_sums=True))
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and "_norm" in str(node.target):
            given = given_arguments(node)
            if any(given.get(name) for name in _TRAINING):
                written = [given.get(name) for name in _STATISTICS]
                found |= {root: None for root in written if isinstance(root, fx.Node)}
    return found
