"""Of Dynamo: what a backend of torch.compile is not told, and how it asks for another trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx.traceback import preserve_node_meta
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

__all__ = [
    "TracedFrame",
    "ask_for_symbols",
    "forget_sizes",
    "has_symbols_asked",
    "input_source",
    "run_traced",
    "traced_frame",
]

_MARKED = "_dynamo_weak_dynamic_indices"
"""Where `torch._dynamo.maybe_mark_dynamic` notes the dims on a tensor."""


@dataclass(frozen=True)
class TracedFrame:
    """The call of a Python function that Dynamo is tracing."""

    code: CodeType
    locals: dict[str, Any]
    globals: dict[str, Any]
    whole: bool
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
        whole=translator.one_graph,
        shape_env=translator.output.shape_env,
        suppressed=bool(torch._dynamo.config.suppress_errors),
    )


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
