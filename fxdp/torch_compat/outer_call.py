"""Inspect the running call of a function returned by `torch.compile`: arguments, model, and current function.

compiled(x)                                   the call of an OptimizedModule
  compile_wrapper(x)                          of torch; holds the arguments
    forward                                   running, up to its first break
      torch_dynamo_resume_in_forward_at_12    the rest, traced by Dynamo when called
        the backend                           called with the trace's graph
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.exc import format_frame_info
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.utils import counters

from fxdp.torch_compat.dynamo import GraphBreak, skipped_function

__all__ = ["OuterCall", "frames_left_out", "graph_end", "outer_call"]

_MODULE_CALL = nn.Module.__call__.__code__.co_filename
_BACKEND = torch._TorchCompileWrapper


@dataclass(frozen=True)
class OuterCall:
    """The running call of a compiled function, during which torch calls a backend for a graph."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    model: nn.Module | None
    """The compiled module; None for a function."""
    keeper: Any
    """An object of torch that all graphs of one `torch.compile` share, and no other graph."""
    running: tuple[str, ...]
    """The running functions, innermost first, named as in `GraphBreak.undefined_gradients`."""
    outermost: bool
    """True if the graph is part of the compiled function itself, not of a function that it calls."""
    optimized: eval_frame.OptimizedModule | None = None
    """The result of `torch.compile` for a module."""


def outer_call() -> OuterCall | None:
    """Return the running call from within a backend; None if torch's frames do not show the call."""
    frames = list(_frames())
    wrapper = next((i for i, frame in enumerate(frames) if _is_wrapper(frame)), None)
    if wrapper is None:
        return None
    keeper = next((f.f_locals["self"] for f in frames[:wrapper] if isinstance(_self(f), _BACKEND)), None)
    around = (_self(frame) for frame in frames[wrapper:])
    compiled = next((found for found in around if isinstance(found, eval_frame.OptimizedModule)), None)
    held = frames[wrapper].f_locals
    model = None if compiled is None else compiled._orig_mod
    running = _running(frames[:wrapper])
    names = tuple(format_frame_info(frame.f_code) for frame in running)
    resumed = all(f.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX) for f in running[:-1])
    return OuterCall(held["args"], held["kwargs"], model, keeper, names, resumed, compiled)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _self(frame: FrameType) -> Any:
    return frame.f_locals.get("self")


def _is_wrapper(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == eval_frame.__file__ and {"args", "kwargs"} <= set(code.co_varnames)


def _running(inner: list[FrameType]) -> list[FrameType]:
    """Return the running frames of the compiled function and of its callees.

    `inner` are the frames inside of torch's wrapper, innermost first, beginning with the backend's and
    torch's.
    """
    traces = [i for i, frame in enumerate(inner) if frame.f_code.co_filename == convert_frame.__file__]
    running = inner[traces[-1] + 1 :] if traces else []
    while running and running[-1].f_code.co_filename == _MODULE_CALL:
        running.pop()
    return running


def graph_end(gm: fx.GraphModule) -> GraphBreak | None:
    """Return the place and reason of the break that ends a graph of Dynamo; None if the function ends."""
    reason: Any = gm.compile_subgraph_reason
    return GraphBreak(reason.reason, tuple(reason.user_stack)) if reason.graph_break else None


def frames_left_out() -> tuple[GraphBreak, ...]:
    """Return the functions that Dynamo has skipped so far, which run eagerly."""
    texts = counters["unimplemented"]
    return tuple(GraphBreak(text, (), name) for text in texts if (name := skipped_function(text)))
