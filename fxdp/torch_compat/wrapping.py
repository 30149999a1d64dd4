"""Of what torch puts around modules: how its wrappers are known by what they do to the module inside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.convert_frame import compile_lock
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["READ_BY_WRAPPERS", "global_hooks", "running_ddp", "running_transform"]

READ_BY_WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    # asked of every module that Dynamo wraps or meets, whether it is a lazy one
    "_initialize_hook": "torch.compile",
}
"""Attributes that a wrapper's constructor asks a module for, and nobody else does."""


def running_transform() -> str:
    """What traces or transforms the code that calls this (`vmap`, `torch.export`); empty for nothing."""
    # asked at each call of a compiled module, so the answers that are there at once come first
    level: Any = peek_interpreter_stack()
    if level is not None:
        return f"torch.func ({str(level.key()).rpartition('.')[2].lower()})"
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "torch.jit.trace"
    compiling = torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or _traces_here())
    return "torch.export or torch.compile" if compiling else ""


def _traces_here() -> bool:
    """Whether this thread is the one that traces: torch's flag is that of the process."""
    return compile_lock._is_owned() or bool(_get_current_dispatch_mode_stack())  # type: ignore[attr-defined]


def running_ddp() -> nn.Module | None:
    """The `DistributedDataParallel` inside of whose forward this is called."""
    return DistributedDataParallel._active_ddp_module


def global_hooks() -> list[int]:
    """The numbers of the hooks on the forwards of all modules of the process.

    Those of torch's own tools (`CommDebugMode`, `ModuleTracker`), which only look on, are not among them.
    """
    registries = modules._global_forward_hooks, modules._global_forward_pre_hooks
    return [number for each in registries for number, hook in each.items() if not _is_of_torch(hook)]


def _is_of_torch(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"
