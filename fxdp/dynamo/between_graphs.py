"""Connect the graphs of one call that torch breaks into several.

    graph 1  --  h, this rank's rows  -->  Python  -->  graph 2    gradients of the global loss, as between
                                                                   compiled modules:
                                                                   runtime/chained_modules.py
    graph 1  --  scale, replicated     -->  Python  -->  graph 2    Python may have used scale on this rank's
                                                                   rows: the gradient is the ranks' mean

Python between graphs must not read parameters, because the gradients would not be summed over the ranks. A
read is detected where results enter a graph, where a parameter gets a gradient although no graph reads the
parameter, and, for a parameter that is read by graphs and by Python after the last graph, by comparing values
after the first step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxdp.capture.captured import OutputLeaf
from fxdp.compiler.program import Program
from fxdp.dynamo.break_report import BreakReport
from fxdp.dynamo.graph_break_inputs import KnownPlacement, placements_of_tensor, record_placements
from fxdp.errors import InputError, StateError
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Output
from fxdp.ir.ops.collectives import finish, start_all_reduce
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import LOCAL, B
from fxdp.module.cache_entry import CacheEntry
from fxdp.module.compiled import CompiledModule
from fxdp.ranks.liveness.failure import guard
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.chained_modules import parameters_behind

_log = logging.getLogger("fxdp")
_WATCHED = "_fxdp_watched"


@dataclass
class BetweenGraphs:
    """One of several graphs of a call, with the connections to earlier and later graphs."""

    report: BreakReport
    last: bool
    """True if the call ends with this graph, so that the outputs go to the caller alone."""
    passed: frozenset[str]
    """The inputs that are not arguments of the call."""
    model: weakref.ref[nn.Module] | None
    _cache_entry: CacheEntry | None = None
    _lies: tuple[KnownPlacement | None, ...] = ()
    _ran: bool = False

    def prepare(self, compiled: CompiledModule, tensors: Mapping[str, Tensor]) -> None:
        """Prepare for the first call of a compiled module that reads these parameters and buffers.

        Raises
        ------
        InputError : the mesh has stages.
        """
        process_mesh = compiled._process_mesh
        if process_mesh.mesh.pipeline.size > 1:
            raise InputError(
                "graph_breaks=True with a mesh axis pp: stages run the backward inside of one call, which "
                "has the loss; expected a mesh of data axes, or fullgraph=True"
            )
        if process_mesh.mesh.world == 1:
            return
        for name, tensor in tensors.items():
            _watch_of(tensor, name).read = True
        model = None if self.model is None else self.model()
        for name, parameter in () if model is None else model.named_parameters():
            _watch_of(parameter, name).begin(parameter)

    def enter(
        self, compiled: CompiledModule, inputs: Mapping[str, Any], dims: Mapping[str, int | None]
    ) -> None:
        """Check the inputs before a call.

        Raises
        ------
        InputError : the placement of an input differs from the traced placement, or the input was computed
            from parameters outside of all graphs.
        """
        if self._ran and not torch.is_grad_enabled():
            self._tell(compiled)
        if (
            compiled._last_call.number == 1
        ):  # after the first step parameters tell whose gradients were not summed
            compiled._replicas.ask(now=True)
        for name in self.passed:
            lies = placements_of_tensor(inputs[name])
            if lies is not None and lies != KnownPlacement(dims[name]):
                raise InputError(
                    f"{name} came from another graph than when torch.compile traced what follows, and lies "
                    "otherwise on the ranks; expected the same of both ways through the model's code"
                )
            used = parameters_behind(inputs[name]) if torch.is_grad_enabled() else iter(())
            if (parameter := next(used, None)) is not None:
                raise InputError(_used(name, parameter))

    def leave(self, compiled: CompiledModule, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the graph, prepared for later graphs."""
        first, self._ran = not self._ran, True
        process_mesh, cache_entry = compiled._process_mesh, compiled._last_call.cache_entry
        assert cache_entry is not None
        if self.last:
            self._tell(compiled)
            return list(outputs)
        if cache_entry is not self._cache_entry:
            self._cache_entry, self._lies = cache_entry, _output_placements(cache_entry.program)
        pairs = zip(outputs, self._lies, strict=True)
        values = [self._left(value, lies, process_mesh) for value, lies in pairs]
        differentiable = (v for v in values if isinstance(v, Tensor) and v.requires_grad)
        if first and (value := next(differentiable, None)) is not None:
            # no event marks the end of a call that ends in Python; all graphs are known when the backward
            # begins
            value.register_hook(lambda _: self._tell(compiled))  # type: ignore[no-untyped-call]
        return values

    def _left(self, value: Any, lies: KnownPlacement | None, process_mesh: ProcessMesh) -> Any:
        if lies is None or not isinstance(value, Tensor):
            return value
        if lies.dim is None and value.requires_grad and process_mesh.mesh.world > 1:
            value = _MeanGradient.apply(value, process_mesh)  # type: ignore[no-untyped-call]
        record_placements(value, lies)
        return value

    def _tell(self, compiled: CompiledModule) -> None:
        news = self.report.news() if self.report.told < len(self.report.graphs) else ""
        if news and compiled._process_mesh.index == 0:  # equal on all ranks
            _log.warning(news)


def _output_placements(program: Program) -> tuple[KnownPlacement | None, ...]:
    """Return the placement of each leaf of a program's output; None for a leaf that is not a tensor."""
    pairs, alone = results_of(program.gm.graph), program.mesh.size == 1
    found = {spec.index: _lies(node, alone) for spec, node in pairs if isinstance(spec, Output)}
    leaves = program.captured.leaves
    return tuple(found[leaf.index] if isinstance(leaf, OutputLeaf) else None for leaf in leaves)


def _lies(node: fx.Node, alone: bool) -> KnownPlacement:
    placement, shape = meta(node).placement, tensor_type(node).shape
    if alone:  # nothing is split, but torch must not make the batch size a constant
        return KnownPlacement(next((dim for dim, size in enumerate(shape) if size in (B, LOCAL)), None))
    if not isinstance(placement, Shard):
        return KnownPlacement(None)
    return KnownPlacement(placement.dim, placement.outer != 1 or shape[placement.dim] not in (B, LOCAL))


def _used(name: str, parameter: nn.Parameter) -> str:
    watched: _Watched | None = parameter.__dict__.get(_WATCHED)
    called = watched.name if watched is not None else f"a parameter of shape {tuple(parameter.shape)}"
    return (
        f"{name} was computed from {called} by Python between two graphs of torch.compile, on this rank's "
        "rows alone, and nobody would sum that gradient over the ranks; expected parameters to be read "
        "inside of graphs: move the break, or use fxdp.compile(model)"
    )


@dataclass
class _Watched:
    """A parameter of a broken call, stored as an attribute of the parameter."""

    name: str
    read: bool = False
    """True if a graph reads the parameter, and so reduces the gradient."""
    watched: bool = False

    def begin(self, parameter: Tensor) -> None:
        """Check the parameter's gradients from now on."""
        if not self.watched and parameter.requires_grad:
            self.watched = True
            parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, parameter: Tensor) -> None:
        if not self.read:
            raise StateError(
                f"{self.name} got a gradient, but no graph of torch.compile reads it: what uses it runs as "
                "ordinary code on each rank's rows, and nobody sums its gradient over the ranks. Expected "
                'code that torch.compile can trace there (TORCH_LOGS="graph_breaks" shows why not), or '
                "fxdp.compile(model)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watched, (self.name,)  # a model that is loaded elsewhere is not watched


def _watch_of(parameter: Tensor, name: str) -> _Watched:
    found: _Watched = parameter.__dict__.setdefault(_WATCHED, _Watched(name))
    return found


class _MeanGradient(torch.autograd.Function):
    """Identity for a replicated tensor; the gradient is the mean of the ranks' gradients.

    A graph that reads the tensor gives equal gradients on all ranks, so the mean is the gradient. A value
    that Python makes from the tensor and from this rank's rows gets a gradient times the number of ranks on
    entering a graph (`runtime/chained_modules.py`), so the mean is the sum over all rows.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, process_mesh: ProcessMesh) -> Tensor:
        ctx.process_mesh = process_mesh
        return value.clone()  # not a view, because Python between graphs may write into the value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        process_mesh: ProcessMesh = ctx.process_mesh
        with guard(process_mesh):
            total = finish(start_all_reduce(gradient.contiguous(), "sum", process_mesh.mesh.group()))
        return total / process_mesh.mesh.size, None
