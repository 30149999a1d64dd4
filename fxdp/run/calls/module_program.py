"""`ModuleProgram`: a script's module, compiled for calls with global tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.captured import Captured
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.signature import Buffer, Input, Mutation
from fxdp.module.cache_entry import CacheEntry
from fxdp.module.compiled import CompiledModule
from fxdp.module.fallback import FallsBackError
from fxdp.module.guards.guards import GuardedState
from fxdp.options import Options
from fxdp.ranks.liveness.failure import everywhere
from fxdp.torch_compat import same_versions


class ModuleProgram(CompiledModule):
    """The programs of a module for calls with one structure of arguments.

    Parameters
    ----------
    batch_dims : the batch dim of each tensor argument, 0 or None, as a pytree.
    backend : as of `fxdp.compile`.

    Raises
    ------
    InputError : a module that cannot be compiled.
    """

    def __init__(self, module: nn.Module, batch_dims: Any, backend: str) -> None:
        options = Options(batch_dims=batch_dims, backend=backend, rng="single-device", fallback="eager")
        super().__init__(module, None, options)
        self.script_module, self.script_modules = module, tuple(module.modules())
        self.script_parameters = dict(module.named_parameters())
        self._buffers_of_module = dict(module.named_buffers(remove_duplicate=False))
        self._written = set[str]()
        self.buffers_before = {}

    script_module: nn.Module
    script_modules: tuple[nn.Module, ...]
    script_parameters: dict[str, nn.Parameter]
    """The script's module, all modules in it, and its parameters, as long as `holds_same_tensors`."""
    _buffers_of_module: dict[str, Tensor]
    _written: set[str]
    buffers_before: dict[str, Tensor]
    """Copies, made before the last call, of the buffers that programs write."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with global tensors.

        Statistics are written without autograd's notice, as torch's own BatchNorm writes them: a call before
        this one, which ran op by op, may have saved them.
        """
        if not self._buffers_of_module:
            return self.forward(*args, **kwargs)
        self.buffers_before = {}
        self._copy_buffers(self._written)
        with same_versions(tuple(self._buffers_of_module.values())):
            return self.forward(*args, **kwargs)

    def _copy_buffers(self, names: Iterable[str]) -> None:
        if torch.is_grad_enabled():
            of_module = self._buffers_of_module
            self.buffers_before |= {name: of_module[name].detach().clone() for name in names}

    @property
    def state(self) -> GuardedState:
        """All that decides on the program beside the arguments; one object while nothing changes."""
        return self._guards.state()

    @property
    def holds_same_tensors(self) -> bool:
        """Whether the module's parameters, buffers and children are those for which it was compiled."""
        return self._guards.tensors.unchanged()

    @property
    def compiled(self) -> int:
        """The number of programs that were compiled."""
        return self._programs.compiled

    @property
    def refusal(self) -> str:
        """Why the last call ran op by op; empty if a program served it."""
        last = self._last_call
        return last.refused or "capture refuses it" if last.cache_entry is None else ""

    def _begin(self, cache_entry: CacheEntry) -> None:
        """Run only programs that do all that the module's code does.

        Raises
        ------
        FallsBackError : the code writes its arguments, or Python state outside of the module.
        """
        if reason := _left_out(cache_entry.program.captured, cache_entry):
            self._last_call.cache_entry, self._last_call.refused = None, reason
            raise everywhere(FallsBackError(reason))
        written = _written_buffers(cache_entry) - self._written
        self._written |= written
        self._copy_buffers(written)
        super()._begin(cache_entry)

    def _share(self) -> None:
        """Share nothing: all ranks ran the same lines, and the script may be between forward and backward."""
        self._shared = True

    def _watch_optimizers(self) -> None:
        """Do nothing: the script's optimizers are made of the script's own parameters."""
        self._watch = None


def _written_buffers(cache_entry: CacheEntry) -> set[str]:
    specs = (spec for spec, _ in results_of(cache_entry.program.gm.graph))
    owners = (spec.of for spec in specs if isinstance(spec, Mutation))
    return {of.name for of in owners if isinstance(of, Buffer)}


def _left_out(captured: Captured, cache_entry: CacheEntry) -> str:
    """Return what the module's code does and a program would not; empty if nothing."""
    if captured.written:
        return "its forward changes Python values outside of it"
    results = results_of(cache_entry.program.gm.graph)
    if any(isinstance(spec, Mutation) and isinstance(spec.of, Input) for spec, _ in results):
        return "its forward writes its arguments"
    return ""
