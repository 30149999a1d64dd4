"""`torch.compile(model, backend="fxdp", fullgraph=True, options={...})`: Dynamo traces, fxdp compiles.

    frame of the model's forward  --  Dynamo  -->  graph  --  here  -->  TracedModel  --  as by fxdp.compile

Dynamo traces on each rank alone, for the sizes of that rank's part of the batch. So its graph is traced anew
with symbols as the batch sizes, its own guards on these are dropped, as the program serves all of them, and
what they asked is asked of the global batch. The ranks compare their graphs at each call.

`fullgraph=True` is demanded: without it torch runs what it cannot trace as ordinary code, on one rank's part
of the batch, and parameters that are used there would get this rank's gradients; no backend is told of it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxdp
from fxdp.capture.batch_dims import RowsPerSample
from fxdp.capture.export.traced_model import TracedModel
from fxdp.errors import AgreementError, InputError
from fxdp.integrations.dynamo_graph import ReadGraph, read_graph
from fxdp.module.cache import Recent
from fxdp.module.compiled import CompiledModule
from fxdp.options import Options
from fxdp.ranks.agreement import agree
from fxdp.torch_compat import TracedFrame, running_ddp, traced_frame

_MODELS = 16
"""Models of one function, or sets of its inputs, that stay compiled."""


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What `torch.compile` calls with each graph; `options` are those of `fxdp.compile`, and `mesh`.

    A graph that is refused becomes a function that raises: an error from here would be torch's, and it may
    be told to go on without a backend.
    """
    try:
        chosen = _chosen(mode, options)
        frame = _frame()
        read = read_graph(gm, frame, chosen.options.batch_dims)
        _check_losses(read, chosen.options)
    except InputError as error:
        return _refusing(error)
    return _Call(read, chosen, _title(frame))


@dataclass(frozen=True)
class _Chosen:
    """What the user chose."""

    mesh: Any
    options: Options

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.mesh), *self.options.lines(), str(self.options.dump_dir)


def _chosen(mode: str | None, given: Mapping[str, Any] | None) -> _Chosen:
    """The options, checked.

    Raises
    ------
    InputError : unknown ones, with those that are near; those that need the model itself.
    """
    named = dict(given or {})
    known = list(inspect.signature(fxdp.compile).parameters)[1:]
    unknown = [_nearest(name, known) for name in named if name not in known]
    if unknown:
        raise InputError(f'torch.compile(backend="fxdp", options=...): {"; ".join(unknown)}')
    if mode not in (None, "default"):
        raise InputError(
            f'torch.compile(backend="fxdp", mode={mode!r}): modes are Inductor\'s; expected none, and '
            'options of fxdp.compile in options={"compute": "inductor", ...}'
        )
    mesh = named.pop("mesh", None)
    options = Options.named(named)
    needs = _needs_model(options)
    if needs:
        call = ", ".join(["model", *(f"{name}={_text(value)}" for name, value in (given or {}).items())])
        raise InputError(
            f'torch.compile(backend="fxdp", options=...): {needs}. Use compiled = fxdp.compile({call}), '
            "which compiles by Inductor as well"
        )
    return _Chosen(mesh, options)


def _needs_model(options: Options) -> str:
    """Which of the options cannot be had of a graph, and why."""
    if options.shards:
        return (
            "strategy='shard' deals out the model's parameters, which a backend of torch.compile is not given"
        )
    if options.loss_fn is not None:
        return "loss_fn= needs the call's target=, which is no argument of the compiled function"
    if isinstance(options.stages, (list, tuple)):
        return "stages= names modules, of which a graph has none"
    if any(isinstance(leaf, RowsPerSample) for leaf in tree_leaves(options.batch_dims)):
        return "batch_dims= counts rows per sample, for which the model's inputs are read whole"
    if options.pad is not None and not isinstance(options.pad, (int, float)):
        return "pad= is a container, but a graph has its inputs one by one"
    return ""


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _text(value: Any) -> str:
    """A value as one writes it; a name for what has no such text."""
    plain = isinstance(value, (str, int, float, bool, type(None), tuple, list, dict))
    return repr(value) if plain else getattr(value, "__name__", "...")


def _frame() -> TracedFrame:
    """What Dynamo is tracing.

    Raises
    ------
    InputError : not Dynamo, or Dynamo where it may leave out what it cannot trace.
    """
    frame = traced_frame()
    if frame is None:
        raise InputError(
            'the backend "fxdp" is for torch.compile, which tells it of the model; expected '
            "fxdp.compile(model) elsewhere"
        )
    if not frame.whole or frame.suppressed:
        wrong = "fullgraph=True" if not frame.whole else "torch._dynamo.config.suppress_errors = False"
        raise InputError(
            f'torch.compile(model, backend="fxdp"): expected {wrong}. Without it torch runs what it cannot '
            "trace as ordinary code, on this rank's part of the batch alone: losses would be this rank's, "
            "and parameters used there would get this rank's gradients. fxdp.compile(model) takes models "
            "that torch.compile cannot trace as a whole"
        )
    if (ddp := running_ddp()) is not None:
        raise InputError(
            f"torch.compile compiles inside of DistributedDataParallel({type(ddp.module).__name__}), which "
            "reduces gradients itself; expected the model without it, as fxdp finds and inserts all "
            "communication"
        )
    return frame


def _title(frame: TracedFrame) -> str:
    """What errors and plans call the model."""
    held = (frame.locals.get(name) for name in ("self", "fn"))
    model = next((module for module in held if isinstance(module, nn.Module)), None)
    return frame.code.co_name if model is None else type(model).__name__


def _check_losses(read: ReadGraph, options: Options) -> None:
    """In micro-batches and stages the backward runs inside of the call, for one loss."""
    cut = options.microbatches > 1 or options.stages not in (None, 1)
    if cut and read.losses > 1:
        raise InputError(
            f"the compiled function returns {read.losses} scalars with a gradient, of which a graph does not "
            "say which is the loss; expected one with microbatches= or stages=: detach() the others"
        )


def _refusing(error: InputError) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise InputError(str(error))

    return refuse


class _Compiled:
    """The compiled modules of which a tensor is the first parameter or buffer.

    It is kept on that tensor, so that it lives as long as the model: torch keeps a compiled function, and
    what that holds, as long as the model's class.
    """

    def __init__(self) -> None:
        self.modules: Recent[Any, tuple[CompiledModule, TracedModel, Any]] = Recent(_MODELS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Compiled, ()  # a model that is pickled leaves its programs behind


_KEPT = "_fxdp_compiled"


@dataclass
class _Call:
    """Runs one graph, for any model whose parameters come with the call."""

    read: ReadGraph
    chosen: _Chosen
    title: str
    _own: _Compiled = field(default_factory=_Compiled)
    """Of a graph without parameters and buffers."""

    def __call__(self, *arguments: Any) -> list[Any]:
        """What the graph returns, of the global batch."""
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
        try:
            return list(compiled(**inputs))
        except AgreementError as error:
            if "graph " in str(error):  # each rank has it: they differ in what the call was traced to
                agree(compiled._joined, graph.lines, "graphs of torch.compile")
            raise

    def _compiled(self, tensors: Mapping[str, Tensor]) -> tuple[CompiledModule, TracedModel]:
        first = next(iter(tensors.values()), None)
        kept = self._own if first is None else first.__dict__.setdefault(_KEPT, _Compiled())
        dims = tuple(self.read.dims.items())
        key = (self.chosen.key, dims, tuple((name, id(tensor)) for name, tensor in tensors.items()))
        found = kept.modules.get(key)
        if found is None:
            found = kept.modules[key] = self._made(tensors)
        return found[0], found[1]

    def _made(self, tensors: Mapping[str, Tensor]) -> tuple[CompiledModule, TracedModel, Any]:
        model = type(self.title, (TracedModel,), {})(tensors)
        batch_dims = ((), dict(self.read.dims))
        options = Options(**{**vars(self.chosen.options), "batch_dims": batch_dims})
        return CompiledModule(model, self.chosen.mesh, options), model, self.chosen.mesh
