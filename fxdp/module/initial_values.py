"""The first values of a model built under `torch.device("meta")`: what one device would have drawn.

    for each module, children first        as constructors run
        reset_parameters                   its own, if it has one
        _init_weights(each module inside)  if it is a model that has this, as those of transformers do

An initialiser runs twice: on the meta device, to see which tensors it writes, and then with these made full.
Rows are kept and the full value is dropped, so a rank has room for what one initialiser writes, not for the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxdp.ir.draws import kept_random_state
from fxdp.ir.model_tensors import full_value

_Place: TypeAlias = "tuple[nn.Module, dict[str, Any], str]"
"""Where a tensor is registered: its module, one of its registries, its name there."""

_RESETS = ("reset_parameters", "_reset_parameters")


def initialise(
    module: nn.Module, made: Mapping[Tensor, Tensor], keep: Callable[[Tensor, Tensor], None]
) -> list[Tensor]:
    """Draw values for `made`, the tensors that take the place of the model's; those that got none.

    Parameters
    ----------
    module : the model, on the meta device.
    made : for each of its parameters and buffers what will take its place.
    keep : called with one of `made` and its full value.
    """
    model = _Model(module, made, keep)
    with torch.no_grad():
        for run, scope in _initialisers(module):
            model.let(run, scope)
    return [tensor for tensor in made if tensor not in model.written]


def _initialisers(module: nn.Module) -> Iterator[tuple[Callable[[], Any], nn.Module]]:
    """What sets values, in the order in which constructors would, and the module that it is about."""
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
                # a model of transformers leaves alone what a model inside of it has drawn already
                if not (hasattr(here, "tie_weights") and inner in done):
                    done.add(inner)
                    yield partial(draw, inner), inner

    yield from walk(module)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


class _Model:
    """A model of which some tensors are full for a moment."""

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
        # by memory, as `weight.data.normal_()` writes through another tensor, with a version count of its own
        self._by_memory = {tensor.untyped_storage()._cdata: tensor for tensor in self._places}
        self.written: set[Tensor] = set()

    def let(self, run: Callable[[], Any], scope: nn.Module) -> None:
        """Run an initialiser and keep what it writes."""
        inside = set(scope.modules())
        touched = self._touched(run, scope)
        full = {tensor: self._full(tensor) for tensor in touched}
        for tensor, value in full.items():
            self._put(tensor, value)
        try:
            run()
            for tensor in touched:
                owner, registry, name = self._places[tensor][0]
                # a tied one is drawn for each module that has it, and the first one's values are its values
                if owner in inside:
                    self._keep(self._made[tensor], registry[name].detach())
                    self.written.add(tensor)
        finally:
            for tensor in touched:
                self._put(tensor, tensor)

    def _touched(self, run: Callable[[], Any], scope: nn.Module) -> list[Tensor]:
        """The tensors that an initialiser writes."""
        writes = _Writes()
        failed = True
        with kept_random_state(), suppress(Exception), writes:
            run()
            failed = False
        found = [tensor for memory, tensor in self._by_memory.items() if memory in writes.memory]
        if failed:  # it looks at values, which meta tensors have not
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
    """Notes the memory that ops write, by whatever tensor over it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                self.memory.add(value.untyped_storage()._cdata)
        return func(*args, **kwargs)
