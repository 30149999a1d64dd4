"""Internals of execution: code of graph modules, autograd nodes, steps of optimizers, fetches of loaders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils.fetch import _MapDatasetFetcher

__all__ = [
    "MapFetcher", "autograd_inside", "backward_class", "begin_autograd", "boxed_code", "graph_module",
    "release_saved_tensors", "surround_step", "unheard", "without_autocast", "without_step_hooks",
]  # fmt: skip


MapFetcher = _MapDatasetFetcher
"""Fetches the samples of a batch from a dataset with indices, for a data loader or in its workers."""

unheard = torch._C.DisableTorchFunction
"""`with unheard():` bypasses torch function modes and tensor subclasses for accesses to tensors inside."""


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Let autograd record inside the kernel of an op, which torch calls below autograd."""
    keys = torch._C.DispatchKey
    below = (keys.AutogradFunctionality, keys.ADInplaceOrView)
    guards = [torch._C._SetExcludeDispatchKeyGuard(key, False) for key in below]
    with guards[0], guards[1], torch.enable_grad():
        yield


@cache
def begin_autograd() -> None:
    """Let autograd count devices, as in the first backward of a process, before any fake tensor exists.

    Fake tensors make torch report eight GPUs in a build for CUDA without a GPU. Autograd would start a thread
    for each, and from then on refuse to work in forks of this process.
    """
    with _disable_current_modes(), unheard(), torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), device="cpu", requires_grad=True)
        with suppress(RuntimeError):  # raised in a fork
            one.backward()  # type: ignore[no-untyped-call]


def graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """Return a graph module whose Python code is generated at the first call or read."""
    # passes make a graph module each, and generating the code takes longer than most passes
    return _LazyGraphModule(root, graph, name)


def boxed_code(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the graph as a function of one list, which the function empties to free values early."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()  # marks the code as old; a lazy module would generate it in the first step
    _LazyGraphModule.force_recompile(gm)  # type: ignore[no-untyped-call,unused-ignore]
    return gm.forward


def backward_class(function: type[torch.autograd.Function]) -> type:
    """Return the class of the autograd nodes that an autograd function creates."""
    found: type = function._backward_cls
    return found


def release_saved_tensors(ctx: Any) -> None:
    """Free the saved tensors of the forward, inside a backward, unless the graph is retained."""
    # torch frees them, too, but only after the backward has returned, when its inputs and all results would
    # be in memory
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.maybe_clear_saved_tensors()


def surround_step(optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Call `before` as the last pre-hook and `after` as the first post-hook of each step of an optimizer.

    Must be called again before each step, because hooks may have been registered in the meantime.
    """
    sides: tuple[tuple[Any, Callable[..., Any], Callable[..., Any], bool], ...] = (
        (optimizer._optimizer_step_pre_hooks, optimizer.register_step_pre_hook, before, True),
        (optimizer._optimizer_step_post_hooks, optimizer.register_step_post_hook, after, False),
    )
    for hooks, register, hook, last in sides:
        place = next((place for place, known in hooks.items() if known is hook), None)
        if place is None:
            place = register(hook).id
        hooks.move_to_end(place, last=last)


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Call none of an optimizer's own step hooks inside the block."""
    before = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before


def without_autocast() -> AbstractContextManager[None]:
    """Disable autocast for code that already has casts: a graph captured under autocast, or a backward."""
    # values kept in float32 (attention's scores, a region with enabled=False) would be cast once more
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext()
