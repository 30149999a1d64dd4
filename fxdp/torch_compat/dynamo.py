"""Of Dynamo: what a backend of torch.compile is not told, another trace, and where graphs break."""

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
    "GraphBreak",
    "TracedFrame",
    "ask_for_symbols",
    "forget_sizes",
    "graph_breaks",
    "has_symbols_asked",
    "input_source",
    "offer_backend",
    "run_traced",
    "skipped_function",
    "traced_frame",
]

_SKIPPED = re.compile(r"frame skipped: (?P<function>.+ line \d+\))")
_MARKED = "_dynamo_weak_dynamic_indices"
"""Where `torch._dynamo.maybe_mark_dynamic` notes the dims on a tensor."""


def offer_backend(name: str, place: str) -> None:
    """Let torch.compile find a backend by its name, as that of an installed package.

    It is not registered: torch does that itself when the name is asked for, and refuses to do it twice.
    """
    registry._BACKENDS.setdefault(name, EntryPoint(name, place, "torch_dynamo_backends"))


@dataclass(frozen=True)
class TracedFrame:
    """The call of a Python function that Dynamo is tracing."""

    code: CodeType
    locals: dict[str, Any]
    globals: dict[str, Any]
    full: bool
    """Whether torch raises where a call cannot become one graph (`fullgraph=True`)."""
    shape_env: Any
    """What the trace asked of sizes."""
    suppressed: bool
    """Whether a trace that fails becomes an ordinary call, without a word."""


def traced_frame() -> TracedFrame | None:
    """The frame for whose graph a backend is being called; None where there is none."""
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
    """Where Dynamo ends a graph, and why."""

    reason: str
    stack: tuple[FrameSummary, ...]
    """The lines under way, from the outermost; none where Dynamo leaves out an entire function."""
    undefined_gradients: str = ""
    """The function that is left out, and its place."""


def graph_breaks(frame: TracedFrame) -> tuple[int, tuple[GraphBreak, ...]]:
    """How many graphs Dynamo makes of a call, and where they end; for that the call runs once more.

    What the call raises ends it, as it would end the user's own.
    """
    graphs = 0

    def as_it_is(gm: fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    known, texts = len(graph_break_reasons), set(counters["unimplemented"])
    function, args, kwargs = _call_of(frame)
    # the same code with another backend: torch traces it anew, and what it keeps for the user stays
    with contextlib.suppress(Exception):
        torch.compile(function, backend=as_it_is)(*args, **kwargs)
    breaks = [GraphBreak(r.reason, tuple(r.user_stack)) for r in graph_break_reasons[known:]]
    for text in counters["unimplemented"]:
        if text not in texts and (skipped := skipped_function(text)):
            breaks.append(GraphBreak(text, (), skipped))
    return graphs, tuple(breaks)


def skipped_function(text: str) -> str:
    """The function that Dynamo leaves out, by what it writes of that; empty for other texts."""
    found = _SKIPPED.search(text)
    return found["function"] if found is not None else ""


def _call_of(frame: TracedFrame) -> tuple[FunctionType, list[Any], dict[str, Any]]:
    """A frame as a function and its arguments."""
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
    """The Python expression in which Dynamo reads an input of its graph, and the value it found there.

    A float that changes is an input, too: in a tensor, off which the graph reads it by `item()`.
    """
    argument: Any = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        return None
    name = source.name() if callable(source.name) else source.name  # a method before torch 2.12
    in_tensor = argument.pass_arg_as_tensor and isinstance(argument.example, Tensor)
    return name, argument.example.item() if in_tensor else argument.example


def ask_for_symbols(dims: Iterable[tuple[Tensor, int]]) -> NoReturn:
    """From within a backend: let Dynamo trace the frame once more, with symbols as these sizes."""
    for tensor, dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    # with symbols other ops may be in the graph where it broke before: those places are to be found anew
    InstructionTranslator.current_tx().speculation_log.clear()
    # the one way in which torch lets a backend send a frame back: Inductor does so for Python floats
    raise TensorifyScalarRestartAnalysis(restart_reason="fxdp: batch dims as symbols")


def has_symbols_asked(tensor: Tensor, dim: int) -> bool:
    """Whether `ask_for_symbols` was called for this size; the mark stays, as guards were made with it."""
    return dim in getattr(tensor, _MARKED, ())


def forget_sizes(shape_env: Any, symbols: Collection[sympy.Symbol]) -> None:
    """Let the graph of the frame under way serve all values of these sizes, whatever was asked of them."""
    # guards and ranges are kept for symbols, too, that were found to be equal to others
    merged = {symbol for symbol, left in shape_env.replacements.items() if left.free_symbols & set(symbols)}
    every = merged | set(symbols)
    shape_env.guards[:] = [guard for guard in shape_env.guards if not guard.expr.free_symbols & every]
    for symbol in every:
        # torch's own range begins at 2, as it fixes the sizes 0 and 1
        shape_env.var_to_range[symbol] = ValueRanges(0, int_oo)


def run_traced(module: fx.GraphModule, *args: Any) -> Any:
    """Run a graph of Dynamo node by node, on any tensors; what is traced meanwhile keeps its source lines."""
    with preserve_node_meta():
        return _TracedRun(module).run(*args)


class _TracedRun(fx.Interpreter):
    """Enters `torch.autocast` as its user does: the function in a Dynamo graph only records in a trace."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.amp.autocast_mode._enter_autocast:
            mode = torch.autocast(*args)
            mode.__enter__()  # type: ignore[no-untyped-call]
            return mode
        if target is torch.amp.autocast_mode._exit_autocast:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)
