"""The inspectable properties of a compiled module: mesh, and plan, graph and program of the last call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from torch import fx
from torch.utils.hooks import RemovableHandle

from fxdp.capture.locations import Origin
from fxdp.compiler.partial_plan import partial_plan
from fxdp.compiler.planning import Planning
from fxdp.errors import CaptureError, StateError, a_kind
from fxdp.ir.types.mesh import Mesh
from fxdp.module.cache_entry import CacheEntry, LastCall
from fxdp.module.guards.surroundings import refused_wrapper
from fxdp.module.module_wrapper import ModuleWrapper
from fxdp.options import Options
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.reports.graph_display import displayed
from fxdp.reports.plan import Plan
from fxdp.torch_compat import READ_BY_WRAPPERS

_ASKED = {**READ_BY_WRAPPERS, "_is_accelerate_prepared": "accelerator.prepare"}
"""Includes Accelerate's, as used by Trainer: without wrapping, Accelerate still scales losses."""
_WRAPPING = ("torch.distributed.fsdp.", "torch.distributed._composable.")


class _LazyHook:
    """A hook of lazy modules: torch 2.15 reads it from the class, and from the module at a call."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise refused_wrapper("torch.compile(compiled)")


class _Bare(ModuleWrapper):
    """A module wrapper that refuses further wrappers, and works in loops that are written for them.

        DistributedDataParallel, torch.compile      read an attribute of the module in their constructor, as
                                                    does Accelerate before it wraps
        fully_shard, replicate                      register a hook before its forward
        DistributedDataParallel around a parent     is running when the compiled module is called:
                                                    module/guards/surroundings.py

    Each of them would sum gradients twice, shard tensors that programs read, or trace a compiled module.

    Raises
    ------
    InputError : a known wrapper is put around it.
    """

    _initialize_hook = _LazyHook()

    def __dir__(self) -> list[str]:
        """Return the attributes of the module, for tools that read all of them."""
        return [name for name in super().__dir__() if name != "_initialize_hook"]  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        wrapper = _ASKED.get(name)
        if wrapper is not None:
            raise refused_wrapper(f"{wrapper}(compiled)")
        return super().__getattr__(name)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Call a function before each call of the compiled module, with this rank's part."""
        if str(getattr(hook, "__module__", "")).startswith(_WRAPPING):
            owner = a_kind(getattr(hook, "__self__", hook))
            raise refused_wrapper(f"fully_shard, replicate or what else has the hook of {owner}")
        return super().register_forward_pre_hook(hook, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context without effect, for loops that accumulate gradients.

        Each backward sums its gradients over the ranks, inside of this context, too. So after each backward
        `grad` equals the gradient that one device has accumulated so far, and such a loop is exact. To
        communicate once for several parts of a batch, pass all parts in one call with
        `pipeline=fxdp.Pipeline(microbatches=...)`.
        """
        return nullcontext()

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which reads this first."""
        raise refused_wrapper("torch.jit.script(compiled)")

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse `torch.compile`: the module is compiled already."""
        raise refused_wrapper("compiled.compile()")


class Inspected(_Bare):
    """Base class with the inspectable properties; a subclass must provide the attributes declared here."""

    _process_mesh: ProcessMesh
    _mesh: Mesh
    _options: Options
    _last_call: LastCall

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last; with `fallback="eager"`, why a call ran op by op.

        Raises
        ------
        StateError : no program was compiled so far.
        """
        last = self._last_call
        if last.cache_entry is None and last.refused:
            told = f"the call runs on global tensors, op by op, as capture refuses it: {last.refused}"
            error, origin = CaptureError(told), Origin.here(self._options.loss_fn)
            return partial_plan(self._model, self._mesh, self._options, last.batch, error, origin)
        cache_entry = self._last()
        planning = Planning(cache_entry.program, cache_entry.sizes, last.split)
        return planning.plan(self._process_mesh.device_mesh)

    @property
    def graph(self) -> fx.GraphModule:
        """The annotated graph of the program that ran last: see `Plan.graph`."""
        cache_entry = self._last()
        graph = cache_entry.program.graph(cache_entry.sizes, self._process_mesh.device_mesh)
        return displayed(graph, "the annotated graph of the global batch")

    @property
    def program(self) -> fx.GraphModule:
        """The emitted program of this rank that ran last."""
        return displayed(self._last().graph, "this rank's program")

    def _last(self) -> CacheEntry:
        if self._last_call.cache_entry is None:
            raise StateError("nothing is compiled yet: call the module once, or use fxdp.plan")
        return self._last_call.cache_entry

    @property
    def mesh(self) -> Mesh:
        """The mesh of this module, as seen from this rank."""
        return self._mesh

    def __repr__(self) -> str:
        return f"fxdp.compile({self._mesh},\n{self._model!r})"
