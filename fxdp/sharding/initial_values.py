"""Initialize a model built under `torch.device("meta")` with the values that one device would draw.

    for each module, children first        as constructors run
        reset_parameters                   if the module has this method
        _init_weights(each module inside)  if the module has this method, as models of transformers do

An initializer runs twice: on the meta device, to see which tensors are written, and then with these tensors
materialized in full. The shard is kept and the full value dropped, so a rank needs memory for the tensors
that one initializer writes, not for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxdp.ir.graph.draws import kept_random_state
from fxdp.ir.graph.model_tensors import full_value
from fxdp.torch_compat import storage_id

_Place: TypeAlias = "tuple[nn.Module, dict[str, Any], str]"
"""The place where a tensor is registered: module, registry of the module, name in the registry."""

_RESETS = ("reset_parameters", "_reset_parameters")


def initialise(
    module: nn.Module, made: Mapping[Tensor, Tensor], keep: Callable[[Tensor, Tensor], None]
) -> list[Tensor]:
    """Draw values for the replacements of the model's tensors; return the replacements without a value.

    Parameters
    ----------
    module : the model, on the meta device.
    made : the replacement of each parameter and buffer.
    keep : called with a replacement and its full value.
    """
    model = _Model(module, made, keep)
    with torch.no_grad():
        for run, scope in _initialisers(module):
            model.let(run, scope)
    return [tensor for tensor in made if tensor not in model.written]


def _initialisers(module: nn.Module) -> Iterator[tuple[Callable[[], Any], nn.Module]]:
    """Yield the functions that set values, in the order of constructors, each with the module concerned."""
    done: set[nn.Module] = set()

    def walk(here: nn.Module) -> Iterator[tuple[Callable[[], Any], nn.Module]]:
        for child in here.children():
            yield from walk(child)
        reset = next((getattr(here, name) for name in _RESETS if hasattr(type(here), name)), None)
        if reset is not None:
            yield reset, here
        if hasattr(type(here), "_init_weights"):
            draw: Any = here._init_weights
            for inner in _children_first(here):
                # transformers: an outer model skips modules that an inner model has initialized
                if not (hasattr(here, "tie_weights") and inner in done):
                    done.add(inner)
                    yield partial(draw, inner), inner

    yield from walk(module)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


class _Model:
    """A model in which some tensors are materialized in full for the duration of an initializer."""

    def __init__(
        self, module: nn.Module, made: Mapping[Tensor, Tensor], keep: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._made, self._keep = made, keep
        self._places: dict[Tensor, list[_Place]] = {}
        for owner in module.modules():
            for registry in (owner._parameters, owner._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        self._places.setdefault(tensor, []).append((owner, registry, name))
        # by memory, because `weight.data.normal_()` writes through a different tensor with its own version
        # count
        self._by_memory = {storage_id(tensor): tensor for tensor in self._places}
        self.written: set[Tensor] = set()

    def let(self, run: Callable[[], Any], scope: nn.Module) -> None:
        """Run an initializer and keep the written values."""
        inside = set(scope.modules())
        touched = self._touched(run, scope)
        full = {tensor: self._full(tensor) for tensor in touched}
        for tensor, value in full.items():
            self._put(tensor, value)
        try:
            run()
            for tensor in touched:
                owner, registry, name = self._places[tensor][0]
                # a tied tensor is drawn for each module that has it; the first module's values are kept
                if owner in inside:
                    self._keep(self._made[tensor], registry[name].detach())
                    self.written.add(tensor)
        finally:
            for tensor in touched:
                self._put(tensor, tensor)

    def _touched(self, run: Callable[[], Any], scope: nn.Module) -> list[Tensor]:
        """Return the tensors that an initializer writes."""
        writes = _Writes()
        failed = True
        with kept_random_state(), suppress(Exception), writes:
            run()
            failed = False
        found = [tensor for memory, tensor in self._by_memory.items() if memory in writes.memory]
        if failed:  # the initializer reads values, which meta tensors do not have
            own = [*scope._parameters.values(), *scope._buffers.values()]
            found += [t for t in own if t is not None and t not in found]
        return found

    def _full(self, tensor: Tensor) -> Tensor:
        made = self._made[tensor]
        if tensor in self.written:
            value = full_value(made).detach().clone()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=made.device)
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

    def _put(self, tensor: Tensor, value: Tensor) -> None:
        for _, registry, name in self._places[tensor]:
            registry[name] = value


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the memory written by ops, through any tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                self.memory.add(storage_id(value))
        return func(*args, **kwargs)
