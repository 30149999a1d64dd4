"""`torch.compile(model, backend="fxdp", fullgraph=True, options={...})`: Dynamo traces, fxdp compiles.

    frame of the model's forward  --  Dynamo  -->  graph  --  here  -->  TracedModel  --  as by fxdp.compile

Dynamo traces on each rank alone, for the sizes of that rank's part of the batch. So its graph is traced anew
with symbols as the batch sizes, its own guards on these are dropped, as the program serves all of them, and
what they asked is asked of the global batch. The ranks compare their graphs at each call.

`fullgraph=True` is demanded: without it torch runs what it cannot trace as ordinary code, on one rank's part
of the batch, and parameters that are used there would get this rank's gradients; no backend is told of it.
The refusal lists each place where torch breaks off, with its line and reason.

`options={"graph_breaks": True}` is the user's promise that this code treats samples one by one. Then each
graph is a program of its own (`module/between_graphs.py`), and what of the promise can be checked is.
"""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import fx

import fxdp
from fxdp.capture.dynamo.break_report import BreakReport, breaks_in_words
from fxdp.capture.dynamo.dynamo_frame import BrokenFrameError, frame_in_flight, function_of, title_of
from fxdp.capture.dynamo.dynamo_graph import read_graph
from fxdp.capture.dynamo.dynamo_inputs import batch_dim
from fxdp.capture.dynamo.graph_break_inputs import GraphBreakInputs
from fxdp.module.between_graphs import BetweenGraphs
from fxdp.module.traced_call import TracedCall, TracedOptions
from fxdp.torch_compat import TracedFrame, graph_end, offer_backend, outer_call

# pip tells torch by an entry point; this is for who runs fxdp from a folder
offer_backend("fxdp", f"{__name__}:backend")


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What `torch.compile` calls with each graph.

    `options` are those of `fxdp.compile`, `mesh` and `graph_breaks`. A graph that is refused becomes a
    function that raises: an error from here would be torch's, and it may be told to go on without a backend.
    """
    try:
        chosen = _chosen(mode, options)
        frame = frame_in_flight(chosen.graph_breaks)
        return _full(gm, frame, chosen) if frame.full else _one_of_several(gm, frame, chosen)
    except fxdp.InputError as error:
        return _Refusing(error)


def _full(gm: fx.GraphModule, frame: TracedFrame, chosen: TracedOptions) -> TracedCall:
    """A call that is one graph."""
    prefix = chosen.options.batch_dims
    read = read_graph(gm, frame, lambda given: batch_dim(given, prefix, frame))
    chosen.check_losses(read.losses)
    return TracedCall(read, chosen, title_of(frame))


def _one_of_several(gm: fx.GraphModule, frame: TracedFrame, chosen: TracedOptions) -> TracedCall:
    """A graph of a call that torch may break into several.

    Raises
    ------
    InputError : an option that entire calls have only; a value between graphs that cannot be told.
    """
    chosen.check_parts()
    call, end = outer_call(), graph_end(gm)
    if call is None:
        raise fxdp.InputError(
            "graph_breaks=True: the call was not made by what torch.compile returns; expected that"
        )
    model = call.model
    rows = GraphBreakInputs.of(call, chosen.options.batch_dims)
    tensors = () if model is None else (*model.named_parameters(), *model.named_buffers())
    read = read_graph(gm, frame, rows.dim, {id(tensor): name for name, tensor in tensors})
    title = title_of(frame) if model is None else type(model).__name__
    report = BreakReport.of(call, title)
    number = report.add(function_of(frame), end, tuple(rows.made))
    last = end is None and call.outermost
    held = None if model is None else weakref.ref(model)
    between = BetweenGraphs(report, last, frozenset(rows.passed), held)
    return TracedCall(read, chosen, f"{title}, graph {number}", between)


def _chosen(mode: str | None, given: Mapping[str, Any] | None) -> TracedOptions:
    """The options, checked.

    Raises
    ------
    InputError : unknown ones, with those that are near; those that need the model itself.
    """
    named = dict(given or {})
    known = [*list(inspect.signature(fxdp.compile).parameters)[1:], "graph_breaks"]
    unknown = [_nearest(name, known) for name in named if name not in known]
    if unknown:
        raise fxdp.InputError(f'torch.compile(backend="fxdp", options=...): {"; ".join(unknown)}')
    if mode not in (None, "default"):
        raise fxdp.InputError(
            f'torch.compile(backend="fxdp", mode={mode!r}): modes are Inductor\'s; expected none, and '
            'options of fxdp.compile in options={"compute": "inductor", ...}'
        )
    chosen = TracedOptions.named(named)
    if needs := chosen.needs_model:
        call = ", ".join(["model", *(f"{name}={_text(value)}" for name, value in (given or {}).items())])
        raise fxdp.InputError(
            f'torch.compile(backend="fxdp", options=...): {needs}. Use compiled = fxdp.compile({call}), '
            "which compiles by Inductor as well"
        )
    return chosen


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _text(value: Any) -> str:
    """A value as one writes it; a name for what has no such text."""
    plain = isinstance(value, (str, int, float, bool, type(None), tuple, list, dict))
    return repr(value) if plain else getattr(value, "__name__", "...")


class _Refusing:
    """Raises the error at each call; of a call that torch breaks, with all places where it does."""

    def __init__(self, error: fxdp.InputError) -> None:
        self._error = error
        self._more: str | None = None

    def __call__(self, *_: Any) -> NoReturn:
        """Torch calls this in the place of the graph.

        Raises
        ------
        InputError : always.
        """
        if self._more is None:
            found = self._error
            self._more = breaks_in_words(found.frame) if isinstance(found, BrokenFrameError) else ""
        raise fxdp.InputError(f"{self._error}{self._more}")
