"""Of what runs: the code of graphs, the autograd nodes around it, and the steps of optimizers."""

from __future__ import annotations

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

__all__ = [
    "autograd_inside", "backward_class", "begin_autograd", "boxed_code", "graph_module",
    "release_saved_tensors", "surround_step", "unheard", "without_autocast",
]  # fmt: skip


unheard = torch._C.DisableTorchFunction
"""`with unheard():` what is asked of tensors inside comes to no mode of torch functions and no subclass."""


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Let autograd record what is computed inside the kernel of an op, which torch calls below autograd."""
    keys = torch._C.DispatchKey
    below = (keys.AutogradFunctionality, keys.ADInplaceOrView)
    guards = [torch._C._SetExcludeDispatchKeyGuard(key, False) for key in below]
    with guards[0], guards[1], torch.enable_grad():
        yield


@cache
def begin_autograd() -> None:
    """Let autograd count the devices, as it does at the first backward of a process, before all fake tensors.

    These have torch say, in a build for CUDA without a GPU, that there are eight: autograd would start a
    thread for each, and from then on refuse to work in forks of this process.
    """
    with _disable_current_modes(), unheard(), torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), device="cpu", requires_grad=True)
        with suppress(RuntimeError):  # in such a fork
            one.backward()  # type: ignore[no-untyped-call]


def graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph for passes: its Python code is written when somebody first calls or reads it."""
    # passes make a graph module each, and printing and compiling its code takes longer than most of them
    return _LazyGraphModule(root, graph, name)


def boxed_code(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function of one list, which it empties so that its values can be freed early."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()  # notes that the code is old; a lazy module would write it in the first step
    _LazyGraphModule.force_recompile(gm)  # type: ignore[no-untyped-call,unused-ignore]
    return gm.forward


def backward_class(function: type[torch.autograd.Function]) -> type:
    """The class of the autograd nodes that a function leaves."""
    found: type = function._backward_cls
    return found


def release_saved_tensors(ctx: Any) -> None:
    """Inside a backward: let go of what the forward saved, unless the graph is to be kept."""
    # torch does so itself, but only after the backward has returned: by then both its inputs and all
    # its results would be in memory
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.maybe_clear_saved_tensors()


def surround_step(optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Call a function last before each step of an optimizer, and another first after it.

    Others may have registered theirs in the meantime: to be called again before each step.
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


def without_autocast() -> AbstractContextManager[None]:
    """Run as it is what has the casts already: a graph that was captured under autocast, a backward."""
    # what a model keeps in float32 (attention's scores, a region with enabled=False) would be cast once more
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext()
