"""Torch's own channels for the diagnostics of a compiler: `TORCH_TRACE` and the profiler's ranges.

`TORCH_LOGS="+fxdp"` needs no code here: torch treats the name of a package as the name of a logger.
Registering the name as well would do harm: torch resets the levels of registered loggers whenever one of
torch's logging settings changes, and so overwrites the levels that a user has set by `logging`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._logging._internal import trace_log, trace_structured
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "profiling", "trace_artifact", "tracing"]


def profiling() -> bool:
    """Return whether a profiler records this thread; the check takes 60 ns per step."""
    return torch._C._autograd._profiler_enabled()


def tracing() -> bool:
    """Return whether the structured trace has a reader, as with the environment variable `TORCH_TRACE`."""
    # torch always installs one handler, which finds out at the first record that there is no folder
    return any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers)


def trace_artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Write a text into the structured trace, where `tlparse` shows the text as a file called `name`."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=text,
        expect_trace_id=False,  # trace ids number compilations by Dynamo
    )
