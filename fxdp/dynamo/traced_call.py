"""`TracedCall`: run a graph that torch.compile traced as a call of a compiled module.

    torch.compile  --  arguments  -->  TracedCall  --  CompiledModule of a TracedModel  -->  results

Torch keeps one function per graph and passes the parameters at each call. For each set of parameters there is
a compiled module, which lives as long as the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxdp.capture.batch_dims import RowsPerSample
from fxdp.dynamo.between_graphs import BetweenGraphs
from fxdp.dynamo.dynamo_graph import ReadGraph
from fxdp.dynamo.traced_model import TracedModel
from fxdp.errors import AgreementError, InputError
from fxdp.module.cache import LRU
from fxdp.module.compiled import CompiledModule
from fxdp.options import Options
from fxdp.ranks.agreement import agree

_KEPT = "_fxdp_compiled"
_MODELS = 16
"""The number of compiled modules kept for one function, for different models or sets of inputs."""


@dataclass(frozen=True)
class TracedOptions:
    """The user's options for the graphs of a function."""

    mesh: Any
    options: Options
    graph_breaks: bool = False
    """True if torch may break a call into several graphs."""

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> TracedOptions:
        """Create options from keyword arguments.

        Raises
        ------
        InputError : invalid values of options.
        """
        named = dict(given)
        mesh, graph_breaks = named.pop("mesh", None), named.pop("graph_breaks", False)
        if not isinstance(graph_breaks, bool):
            raise InputError(f"graph_breaks is {graph_breaks!r}, expected True or False")
        options = Options.named(named, 'torch.compile(backend="fxdp", options=...)', ("mesh", "graph_breaks"))
        return cls(mesh, options, graph_breaks)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key for caching programs."""
        return id(self.mesh), *self.options.lines(), str(self.options.debug.dump_dir)

    @property
    def needs_model(self) -> str:
        """The reason why an option is impossible for a graph; empty if all options are possible."""
        options = self.options
        if options.may_shard:
            return (
                f"strategy={options.strategy!r} shards the model's parameters, which a backend of "
                "torch.compile is not given"
            )
        if options.loss_fn is not None:
            return "loss_fn= needs the call's target=, which is no argument of the compiled function"
        if isinstance(options.pipeline.stages, (list, tuple)):
            return "fxdp.Pipeline(stages=[...]) names modules, of which a graph has none"
        if any(isinstance(leaf, RowsPerSample) for leaf in tree_leaves(options.batch_dims)):
            return "batch_dims= counts rows per sample, for which the model's inputs are read in full"
        if options.pad is not None and not isinstance(options.pad, (int, float)):
            return "pad= is a container, but a graph has its inputs one by one"
        return ""

    def check_parts(self) -> None:
        """Raise for options that are impossible for a call with several graphs.

        Raises
        ------
        InputError : names the options.
        """
        options = self.options
        alone = {
            "fxdp.Pipeline(microbatches=...)": options.pipeline.microbatches > 1,
            "fxdp.Pipeline(stages=...)": options.pipeline.stages not in (None, 1),
            "pad=": options.pad is not None,
        }
        if given := [name for name, is_given in alone.items() if is_given]:
            raise InputError(
                f"torch breaks the call into several graphs, for which there is no {' and no '.join(given)}: "
                "an entire call has that, with its loss; expected fullgraph=True, or fxdp.compile(model)"
            )

    def check_losses(self, losses: int) -> None:
        """Raise if a graph has several losses although the backward runs inside of the call.

        Raises
        ------
        InputError : micro-batches or stages with several losses.
        """
        cut = self.options.has_microbatches or self.options.pipeline.stages not in (None, 1)
        if cut and losses > 1:
            raise InputError(
                f"the compiled function returns {losses} scalars with a gradient, of which a graph does not "
                "say which is the loss; expected one with fxdp.Pipeline(microbatches=...) or stages: "
                "detach() the others"
            )


class _Compiled:
    """The compiled modules for a tensor that is the first parameter or buffer of a model.

    This object is stored on the tensor, to live as long as the model: torch keeps a compiled function, and
    objects held by the function, as long as the model's class. A graph without tensors stores its own.
    """

    def __init__(self) -> None:
        self.modules: LRU[Any, tuple[CompiledModule, TracedModel, Any]] = LRU(_MODELS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Compiled, ()  # a pickled model does not include programs


@dataclass
class TracedCall:
    """Callable that runs one graph, for any model whose parameters are passed with the call."""

    read: ReadGraph
    chosen: TracedOptions
    title: str
    between: BetweenGraphs | None = None
    """The connections to the remaining graphs if torch breaks the call into several graphs."""

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run the graph on the global batch and return the outputs."""
        graph = self.read.graph
        values = [arguments[i] for i in self.read.positions]
        tensors: dict[str, Tensor] = {}
        inputs: dict[str, Any] = {graph.key: ()}
        for operand, value in zip(graph.operands, values, strict=True):
            if operand.kind == "model":
                tensors[operand.name] = value
            elif operand.kind == "input":
                inputs[operand.name] = value.item() if operand.name in self.read.numbers else value
            elif operand.value is not value:
                raise InputError(
                    f"{operand.name} is another tensor than when torch.compile traced the model, and no "
                    "argument of it; expected an argument, or values that are written in place"
                )
        compiled, model = self._compiled(tensors)
        model.add(graph)
        if self.between is not None:
            self.between.enter(compiled, inputs, self.read.dims)
        try:
            outputs = list(compiled(**inputs))
            return outputs if self.between is None else self.between.leave(compiled, outputs)
        except AgreementError as error:
            if "graph " in str(error):  # equal on each rank: the ranks differ in the graphs that torch traced
                agree(compiled._process_mesh, graph.lines, "graphs of torch.compile")
            raise

    def _compiled(self, tensors: Mapping[str, Tensor]) -> tuple[CompiledModule, TracedModel]:
        keeper: Any = next(iter(tensors.values()), self)
        kept = keeper.__dict__.get(_KEPT)
        if kept is None:
            kept = keeper.__dict__[_KEPT] = _Compiled()
        dims = tuple(self.read.dims.items())
        key = (self.chosen.key, dims, tuple((name, id(tensor)) for name, tensor in tensors.items()))
        found = kept.modules.get(key)
        if found is None:
            found = kept.modules[key] = self._made(tensors)
        return found[0], found[1]

    def _made(self, tensors: Mapping[str, Tensor]) -> tuple[CompiledModule, TracedModel, Any]:
        model = type(self.title, (TracedModel,), {})(tensors)
        batch_dims = ((), dict(self.read.dims))
        options = replace(self.chosen.options, batch_dims=batch_dims)
        compiled = CompiledModule(model, self.chosen.mesh, options)
        if self.between is not None:
            self.between.prepare(compiled, tensors)
        return compiled, model, self.chosen.mesh
