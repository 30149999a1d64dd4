"""`ModuleProgram`: a script's module, compiled for calls with global tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.captured import Captured
from fxdp.capture.patches.side_effects import words_of
from fxdp.ir.graph.draws import RandomState, random_state
from fxdp.ir.graph.graphs import ancestors, inputs_of, results_of
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
        self.written = set[str]()
        self._read_again = set[str]()
        self.buffers_before, self.random_before = {}, None
        self._draws = False

    script_module: nn.Module
    script_modules: tuple[nn.Module, ...]
    script_parameters: dict[str, nn.Parameter]
    """The script's module, all modules in it, and its parameters, as long as `holds_same_tensors`."""
    _buffers_of_module: dict[str, Tensor]
    written: set[str]
    """The names of the buffers that programs write."""
    _read_again: set[str]
    buffers_before: dict[str, Tensor]
    """Copies, made before the last call, of the buffers that programs write and that results depend on.

    Statistics of BatchNorm in training are none of these.
    """
    random_before: RandomState | None
    """The state of the generators before the last call; None if no program draws."""

    def expect(self, varied: bool, varied_dims: bool) -> None:
        """Expect calls of any batch if these are `varied`, and of any other dims, of each new kind."""
        self._programs.varied = varied, varied_dims

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with global tensors.

        Statistics are written without autograd's notice, as torch's own BatchNorm writes them: a call before
        this one, which ran op by op, may have saved them.
        """
        if torch.is_grad_enabled():
            self.buffers_before = {}
            self._copy_buffers(self._read_again)
            self.random_before = random_state() if self._draws else None
        if not self._buffers_of_module:
            return self.forward(*args, **kwargs)
        with same_versions(tuple(self._buffers_of_module.values())):
            return self.forward(*args, **kwargs)

    def _copy_buffers(self, names: Iterable[str]) -> None:
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
    def takes_any_size(self) -> bool:
        """Whether the program of the last call takes calls of any size."""
        last = self._last_call.cache_entry
        return last is not None and last.runs.takes_sizes

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
        written, read = _buffers_of(cache_entry)
        if torch.is_grad_enabled():
            self._copy_buffers(read - self._read_again)
            if cache_entry.draws and not self._draws:
                self.random_before = random_state()
        self.written |= written
        self._read_again |= read
        self._draws |= cache_entry.draws
        super()._begin(cache_entry)

    def _share(self) -> None:
        """Share nothing: all ranks ran the same lines, and the script may be between forward and backward."""
        self._shared = True

    def _watch_optimizers(self) -> None:
        """Do nothing: the script's optimizers are made of the script's own parameters."""
        self._watch = None


def _buffers_of(cache_entry: CacheEntry) -> tuple[set[str], set[str]]:
    """Return the buffers that a program writes, and those of them on whose old value a result depends."""
    graph = cache_entry.program.gm.graph
    written, results = set[str](), []
    for spec, node in results_of(graph):
        if isinstance(spec, Mutation) and isinstance(spec.of, Buffer):
            written.add(spec.of.name)
        else:
            results.append(node)
    sources = ancestors(results)
    read = {buffer.name for buffer, node in inputs_of(graph, Buffer) if node in sources}
    return written, read & written


def _left_out(captured: Captured, cache_entry: CacheEntry) -> str:
    """Return what the module's code does and a program would not; empty if nothing."""
    if captured.written:
        return "its forward changes Python values outside of it"
    if captured.beside:
        return f"its forward {words_of(captured.beside)}"
    results = results_of(cache_entry.program.gm.graph)
    if any(isinstance(spec, Mutation) and isinstance(spec.of, Input) for spec, _ in results):
        return "its forward writes its arguments"
    return ""
