"""`torch.compile(model, backend="fxdp", fullgraph=True, options={...})`: Dynamo traces, fxdp compiles.

    frame of the model's forward  --  Dynamo  -->  graph  --  here  -->  TracedModel  --  as by fxdp.compile

Dynamo traces on each rank alone, for the sizes of the local batch. Therefore the graph is traced again with
symbols as batch sizes, and Dynamo's guards on these sizes are dropped, because the program serves all sizes;
conditions that the guards checked are checked for the global batch. The ranks compare graphs at each call.

Without `fullgraph=True` torch runs code that it cannot trace as ordinary Python on the local batch.
Parameters used there would get local gradients, and torch does not notify the backend. Therefore the call of
a module then runs in full (`dynamo/full_call.py`); a function is refused, with each graph break by line and
reason.

With `options={"graph_breaks": True}` the user promises that this code treats samples one by one. Then each
graph is a program of its own (`dynamo/between_graphs.py`), and fxdp checks the promise as far as possible.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import fx, nn

import fxdp
from fxdp.dynamo.between_graphs import BetweenGraphs
from fxdp.dynamo.break_report import BreakReport, breaks_in_words
from fxdp.dynamo.dynamo_graph import read_graph
from fxdp.dynamo.dynamo_inputs import batch_dim
from fxdp.dynamo.full_call import runs_in_full
from fxdp.dynamo.graph_break_inputs import GraphBreakInputs
from fxdp.dynamo.traced_call import TracedCall, TracedOptions
from fxdp.errors import InputError
from fxdp.settings import wings_are_on
from fxdp.torch_compat import running_ddp
from fxdp.torch_compat.dynamo import TracedFrame, offer_backend, traced_frame
from fxdp.torch_compat.outer_call import graph_end, outer_call

# pip registers the backend by an entry point; this line is for fxdp used from a folder
offer_backend("fxdp", f"{__name__}:backend")


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph for `torch.compile`.

    `options` are the options of `fxdp.compile`, `mesh` and `graph_breaks`. A refused graph becomes a function
    that raises: an error raised here would be reported as torch's, and torch may be configured to continue
    without a backend.
    """
    try:
        if not wings_are_on():
            raise fxdp.InputError(
                'torch.compile(backend="fxdp") is left out by FXDP_WINGS=off; use fxdp.compile(model), or '
                "leave FXDP_WINGS out"
            )
        chosen = _chosen(mode, options)
        frame = frame_in_flight(chosen.graph_breaks)
        return _full(gm, frame, chosen) if frame.full else _one_of_several(gm, frame, chosen)
    except _BrokenFrameError as error:
        if not error.frame.suppressed and runs_in_full(error.frame, outer_call(), chosen):
            return gm.forward  # never called
        return _Refusing(error)
    except fxdp.InputError as error:
        return _Refusing(error)


def _full(gm: fx.GraphModule, frame: TracedFrame, chosen: TracedOptions) -> TracedCall:
    """Compile a call that is one graph."""
    prefix = chosen.options.batch_dims
    read = read_graph(gm, frame, lambda given: batch_dim(given, prefix, frame))
    chosen.check_losses(read.losses)
    return TracedCall(read, chosen, _title_of(frame))


def _one_of_several(gm: fx.GraphModule, frame: TracedFrame, chosen: TracedOptions) -> TracedCall:
    """Compile one graph of a call that torch may break into several graphs.

    Raises
    ------
    InputError : an option that works only for full calls, or an unsupported value between graphs.
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
    title = _title_of(frame) if model is None else type(model).__name__
    report = BreakReport.of(call, title)
    number = report.add(_function_of(frame), end, tuple(rows.made))
    last = end is None and call.outermost
    held = None if model is None else weakref.ref(model)
    between = BetweenGraphs(report, last, frozenset(rows.passed), held)
    return TracedCall(read, chosen, f"{title}, graph {number}", between)


def _chosen(mode: str | None, given: Mapping[str, Any] | None) -> TracedOptions:
    """Check the options.

    Raises
    ------
    InputError : unknown options, with near names or today's spelling; options that need the model itself.
    """
    if mode not in (None, "default"):
        raise fxdp.InputError(
            f'torch.compile(backend="fxdp", mode={mode!r}): modes are Inductor\'s; expected none, and '
            'options of fxdp.compile in options={"backend": "inductor", ...}'
        )
    chosen = TracedOptions.named(given or {})
    if needs := chosen.needs_model:
        call = ", ".join(["model", *(f"{name}={_text(value)}" for name, value in (given or {}).items())])
        raise fxdp.InputError(
            f'torch.compile(backend="fxdp", options=...): {needs}. Use compiled = fxdp.compile({call}), '
            "which compiles by Inductor as well"
        )
    return chosen


def _text(value: Any) -> str:
    """Return a value as Python source; a name for values without such a text."""
    plain = isinstance(value, (str, int, float, bool, type(None), tuple, list, dict))
    return repr(value) if plain or dataclasses.is_dataclass(value) else getattr(value, "__name__", "...")


class _Refusing:
    """Callable that raises the error at each call, with all graph breaks if there are any."""

    def __init__(self, error: fxdp.InputError) -> None:
        self._error = error
        self._more: str | None = None

    def __call__(self, *_: Any) -> NoReturn:
        """Raise the error; torch calls this instead of the graph.

        Raises
        ------
        InputError : always.
        """
        if self._more is None:
            found = self._error
            self._more = breaks_in_words(found.frame) if isinstance(found, _BrokenFrameError) else ""
        raise fxdp.InputError(f"{self._error}{self._more}")


_REMEDY = (
    '; options={"graph_breaks": True} compiles each graph as a program of its own, by which you promise that '
    "what runs between them treats samples one by one and reads no parameter"
)


class _BrokenFrameError(InputError):
    """A call that torch may split into several graphs, with ordinary code between them."""

    def __init__(self, frame: TracedFrame, message: str) -> None:
        self.frame = frame
        super().__init__(message)


def frame_in_flight(graph_breaks: bool) -> TracedFrame:
    """Return the frame that Dynamo traces; with `graph_breaks` the frame may be a part of a call.

    Raises
    ------
    InputError : Dynamo may skip code that cannot be traced, has not called, or runs inside of
        DistributedDataParallel.
    """
    frame = traced_frame()
    if frame is None:
        raise InputError(
            'the backend "fxdp" is for torch.compile, which tells it of the model; expected '
            "fxdp.compile(model) elsewhere"
        )
    broken = not frame.full and not graph_breaks
    if broken or frame.suppressed:
        expected = "fullgraph=True" if broken else "torch._dynamo.config.suppress_errors = False"
        raise _BrokenFrameError(
            frame,
            f'torch.compile(model, backend="fxdp"): expected {expected}. Without it torch runs what it '
            "cannot trace as ordinary code, on this rank's part of the batch alone: losses would be this "
            "rank's, and parameters used there would get this rank's gradients. fxdp.compile(model) takes "
            "models that torch.compile cannot trace as one" + (_REMEDY if broken else ""),
        )
    if (ddp := running_ddp()) is not None:
        raise InputError(
            f"torch.compile compiles inside of DistributedDataParallel({type(ddp.module).__name__}), which "
            "reduces gradients itself; expected the model without it, as fxdp finds and inserts all "
            "communication"
        )
    return frame


def _function_of(frame: TracedFrame) -> str:
    """Return the user's name of the function; the frame may be a resume function after a graph break."""
    name = getattr(frame.code, "co_qualname", frame.code.co_name).rpartition("<locals>.")[2]
    return re.sub(r"(torch_dynamo_resume_in_)+(.*?)(_at_\d+)+$", r"\2", name)


def _title_of(frame: TracedFrame) -> str:
    """Return the name of the model in errors and plans."""
    held = (frame.locals.get(name) for name in ("self", "fn"))
    model = next((module for module in held if isinstance(module, nn.Module)), None)
    return frame.code.co_name if model is None else type(model).__name__
