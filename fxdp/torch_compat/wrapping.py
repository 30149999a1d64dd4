"""Detect torch's wrappers and transforms around modules by their traces in the module or process."""

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

__all__ = [
    "HOOKS", "READ_BY_WRAPPERS", "global_hook_registries", "global_hooks", "is_of_torch", "is_surrounded",
    "optimized", "running_ddp", "running_transform",
]  # fmt: skip

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module with its hooks, by number."""

READ_BY_WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    # Dynamo reads this from every module that it wraps or meets, to detect lazy modules
    "_initialize_hook": "torch.compile",
}
"""Attributes of a module that only the constructor of a wrapper reads."""


def is_surrounded() -> bool:
    """Return whether a `running_transform` or a `running_ddp` is possible: one cheap check for each call."""
    return (
        peek_interpreter_stack() is not None
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or torch.compiler.is_compiling()
        or DistributedDataParallel._active_ddp_module is not None
    )


def running_transform() -> str:
    """Return the transform or trace that runs the calling code (`vmap`, `torch.export`); empty if none."""
    level: Any = peek_interpreter_stack()
    if level is not None:
        return f"torch.func ({str(level.key()).rpartition('.')[2].lower()})"
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "torch.jit.trace"
    compiling = torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or _traces_here())
    return "torch.export or torch.compile" if compiling else ""


def _traces_here() -> bool:
    """Return whether this thread is tracing; torch's flag is process-wide."""
    return compile_lock._is_owned() or bool(_get_current_dispatch_mode_stack())  # type: ignore[attr-defined]


def optimized(module: nn.Module) -> nn.Module:
    """Return what `torch.compile(module)` returns, with the module's own call inside."""
    return torch._dynamo.eval_frame.OptimizedModule(module, lambda call: call)  # type: ignore[arg-type]


def running_ddp() -> nn.Module | None:
    """Return the `DistributedDataParallel` whose forward is running; None outside of one."""
    return DistributedDataParallel._active_ddp_module


def global_hooks() -> list[int]:
    """Return the ids of the process's global forward hooks and pre-hooks.

    Hooks of torch's own tools (`CommDebugMode`, `ModuleTracker`), which only observe, are excluded.
    """
    registries = global_hook_registries()
    return [number for each in registries for number, hook in each.items() if not is_of_torch(hook)]


def global_hook_registries() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the process's global forward hooks and pre-hooks by id, hooks of torch's own tools included."""
    return modules._global_forward_hooks, modules._global_forward_pre_hooks


def is_of_torch(hook: Any) -> bool:
    """Return whether a hook is torch's own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"
