"""Torch's own channels for what a compiler has to say: `TORCH_TRACE`, and the profiler's ranges.

`TORCH_LOGS="+fxdp"` needs nothing here: torch takes a package's name for that of its loggers. To register the
name as well would be worse: torch resets the levels of registered loggers whenever some setting of its own
changes, and with them what a user has set by `logging`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._logging._internal import trace_log, trace_structured
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "profiling", "trace_artifact", "tracing"]


def profiling() -> bool:
    """Whether a profiler records this thread; 60 ns, and nothing else happens at a step without one."""
    return torch._C._autograd._profiler_enabled()


def tracing() -> bool:
    """Whether somebody reads the structured trace, as with the environment variable `TORCH_TRACE`."""
    # torch always has one handler there, which finds out by the first record that it has no folder
    return any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers)


def trace_artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Put a text into the structured trace, where `tlparse` shows it as a file of that name."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=text,
        expect_trace_id=False,  # those number what Dynamo compiles
    )
