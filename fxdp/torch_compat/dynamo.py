"""Internals of Dynamo: traced frames, retracing with symbols, graph breaks, and running Dynamo's graphs."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from traceback import FrameSummary
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.backends import registry
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, graph_break_reasons
from torch.fx.traceback import preserve_node_meta
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

__all__ = [
    "GraphBreak", "TracedFrame", "ask_for_symbols", "forget_sizes", "graph_breaks", "has_symbols_asked",
    "input_source", "offer_backend", "run_traced", "skipped_function", "traced_frame",
]  # fmt: skip

_SKIPPED = re.compile(r"frame skipped: (?P<function>.+ line \d+\))")
_MARKED = "_dynamo_weak_dynamic_indices"
"""The attribute in which `torch._dynamo.maybe_mark_dynamic` records the dims of a tensor."""


def offer_backend(name: str, place: str) -> None:
    """Let torch.compile find a backend by name, like the backend of an installed package.

    The backend is not registered: torch registers a backend on the first request, and refuses a second time.
    """
    registry._BACKENDS.setdefault(name, EntryPoint(name, place, "torch_dynamo_backends"))


@dataclass(frozen=True)
class TracedFrame:
    """The call of a Python function that Dynamo is tracing."""

    code: CodeType
    locals: dict[str, Any]
    globals: dict[str, Any]
    full: bool
    """True if torch raises when a call cannot become one graph (`fullgraph=True`)."""
    shape_env: Any
    """The shape environment of the trace, with the guards on sizes."""
    suppressed: bool
    """True if torch silently runs the function eagerly after a failed trace."""


def traced_frame() -> TracedFrame | None:
    """Return the frame whose graph the running backend compiles; None outside of a backend."""
    try:
        translator: Any = InstructionTranslator.current_tx()
    except (AttributeError, AssertionError):
        return None
    return TracedFrame(
        code=translator.f_code,
        locals=translator.output.local_scope,
        globals=translator.output.global_scope,
        full=translator.one_graph,
        shape_env=translator.output.shape_env,
        suppressed=bool(torch._dynamo.config.suppress_errors),
    )


@dataclass(frozen=True)
class GraphBreak:
    """The place where Dynamo ends a graph, with the reason."""

    reason: str
    stack: tuple[FrameSummary, ...]
    """The running source lines, outermost first; empty if Dynamo skips an entire function."""
    left_out: str = ""
    """The skipped function with its location; empty if no function is skipped."""


def graph_breaks(frame: TracedFrame) -> tuple[int, tuple[GraphBreak, ...]]:
    """Run a call once more, and return the number of Dynamo's graphs and the places where graphs end.

    An exception of the call ends the count early, just as it would end the user's call.
    """
    graphs = 0

    def as_it_is(gm: fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    known, texts = len(graph_break_reasons), set(counters["unimplemented"])
    function, args, kwargs = _call_of(frame)
    # the same code with another backend: torch traces anew, and the user's cached code stays
    with contextlib.suppress(Exception):
        torch.compile(function, backend=as_it_is)(*args, **kwargs)
    breaks = [GraphBreak(r.reason, tuple(r.user_stack)) for r in graph_break_reasons[known:]]
    for text in counters["unimplemented"]:
        if text not in texts and (skipped := skipped_function(text)):
            breaks.append(GraphBreak(text, (), skipped))
    return graphs, tuple(breaks)


def skipped_function(text: str) -> str:
    """Return the function that a text of Dynamo reports as skipped; empty if the text reports none."""
    found = _SKIPPED.search(text)
    return found["function"] if found is not None else ""


def _call_of(frame: TracedFrame) -> tuple[FunctionType, list[Any], dict[str, Any]]:
    """Return a frame as a function with the arguments of the call."""
    code, values = frame.code, frame.locals
    cells = tuple(CellType(values[name]) for name in code.co_freevars)
    function = FunctionType(code, frame.globals, code.co_name, None, cells)
    names = iter(code.co_varnames)
    args = [values[next(names)] for _ in range(code.co_argcount)]
    kwargs = {name: values[name] for _, name in zip(range(code.co_kwonlyargcount), names, strict=False)}
    if code.co_flags & inspect.CO_VARARGS:
        args += values[next(names)]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= values[next(names)]
    return function, args, kwargs


def input_source(node: fx.Node) -> tuple[str, Any] | None:
    """Return the Python expression from which Dynamo reads a graph input, and the value found there.

    A float that changes between calls is an input, too: as a tensor, which the graph reads by `item()`.
    """
    argument: Any = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        return None
    name = source.name() if callable(source.name) else source.name  # a method before torch 2.12
    in_tensor = argument.pass_arg_as_tensor and isinstance(argument.example, Tensor)
    return name, argument.example.item() if in_tensor else argument.example


def ask_for_symbols(dims: Iterable[tuple[Tensor, int]]) -> NoReturn:
    """From within a backend, let Dynamo trace the current frame once more, with symbols for these sizes."""
    for tensor, dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    # with symbols the graph may have different ops before a break, so breaks must be found anew
    InstructionTranslator.current_tx().speculation_log.clear()
    # the only way in which torch lets a backend restart a frame; Inductor uses this for Python floats
    raise TensorifyScalarRestartAnalysis(restart_reason="fxdp: batch dims as symbols")


def has_symbols_asked(tensor: Tensor, dim: int) -> bool:
    """Return whether `ask_for_symbols` was called for a size; the mark stays, because guards depend on it."""
    return dim in getattr(tensor, _MARKED, ())


def forget_sizes(shape_env: Any, symbols: Collection[sympy.Symbol]) -> None:
    """Remove all guards on these sizes, so that the graph of the current frame serves any value."""
    # guards and ranges are also kept for symbols that were found equal to others
    merged = {symbol for symbol, left in shape_env.replacements.items() if left.free_symbols & set(symbols)}
    every = merged | set(symbols)
    shape_env.guards[:] = [guard for guard in shape_env.guards if not guard.expr.free_symbols & every]
    for symbol in every:
        # torch's own range begins at 2, because torch specializes the sizes 0 and 1
        shape_env.var_to_range[symbol] = ValueRanges(0, int_oo)


def run_traced(module: fx.GraphModule, *args: Any) -> Any:
    """Run a graph of Dynamo node by node, on any tensors, keeping source lines on traced nodes."""
    with preserve_node_meta():
        return _TracedRun(module).run(*args)


class _TracedRun(fx.Interpreter):
    """Interpreter that really enters `torch.autocast`; the op in Dynamo's graph only records in a trace."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.amp.autocast_mode._enter_autocast:
            mode = torch.autocast(*args)
            mode.__enter__()  # type: ignore[no-untyped-call]
            return mode
        if target is torch.amp.autocast_mode._exit_autocast:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)
