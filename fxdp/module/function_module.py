"""`FunctionModule`: a function as a module, whose children are the modules that the function's code reaches.

def loss(x, y): return F.cross_entropy(net(x), y)

FunctionModule(loss)         net is a child; forward is the function itself
its deep copy                net is a copy; while its forward runs, the function's net acts as the copy
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from fxdp.capture.leaves import leaf_names
from fxdp.capture.reached_modules import ReachedModules, reached_modules


@dataclass(frozen=True)
class _ModuleInput:
    """The place of a module among a call's arguments; the module is a child of this name."""

    name: str


class FunctionModule(nn.Module):
    """A function that uses modules around it, as one module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._around = _Around(function, reached_modules(function))
        self.forward = self._around.forward = _with_given(function, self._modules)
        self._register()

    @property
    def training(self) -> bool:
        """Whether any of the modules is in training mode."""
        return any(child.training for child in self._modules.values() if child is not None)

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the mode: each module has its own."""

    @property
    def own(self) -> nn.Module:
        """The only module with parameters or buffers, whose names and keys count; else this module."""
        with_state = [child for child in self._modules.values() if child is not None and _has_state(child)]
        return with_state[0] if len(with_state) == 1 else self

    def ids_now(self) -> list[tuple[int, ...]]:
        """Return one item that changes if a place which the function's code reads gets another module."""
        return [tuple(map(id, self._around.reached.at_places()))]

    def reach_again(self) -> None:
        """Register the modules that the function reaches now, after a variable was bound to another one."""
        self._around.reached = reached_modules(self._around.function)
        self._register()

    def without_modules(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[str]]:
        """Return a call's arguments with a `_ModuleInput` for each module, and the names of new modules.

        The modules become children.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(leaf, nn.Module) for leaf in leaves):
            return args, kwargs, []
        before = dict(self._modules)
        for i, name in enumerate(leaf_names(self, args, kwargs)):
            if isinstance(leaves[i], nn.Module):
                named = "".join(c if c.isalnum() else "_" for c in name).strip("_")
                self._around.given[named] = leaves[i]
                leaves[i] = _ModuleInput(named)
        self._register()
        added = [name for name, module in self._modules.items() if before.get(name) is not module]
        return *pytree.tree_unflatten(leaves, structure), added

    def _register(self) -> None:
        around = self._around
        around.originals = [*around.reached.modules.values(), *around.given.values()]
        children = {**around.reached.modules, **around.given}
        if self._modules != children:
            self._modules.clear()
            for name, module in children.items():
                self.add_module(name, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModule:
        """Return a function of copies of the modules."""
        twin: FunctionModule = type(self).__new__(type(self))
        memo[id(self)] = twin
        super(FunctionModule, twin).__init__()
        for name, child in self._modules.items():
            twin.add_module(name, copy.deepcopy(child, memo))
        twin._around = self._around
        pairs = [
            pair
            for original, own in zip(self._around.originals, twin._modules.values(), strict=True)
            for pair in zip(original.modules(), own.modules() if own is not None else (), strict=True)
        ]
        call = self._around.forward  # not this module's, which may be a copy that acts itself

        @functools.wraps(self._around.function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _acting_as(pairs):
                return call(*args, **kwargs)

        twin.forward = forward
        return twin


class _Around:
    """What a function is made of; an object of its own, as guards compare attributes of modules."""

    def __init__(self, function: Callable[..., Any], reached: ReachedModules) -> None:
        self.function = self.forward = function
        self.reached = reached
        self.given: dict[str, nn.Module] = {}
        self.originals: list[nn.Module] = []


def _with_given(function: Callable[..., Any], children: Mapping[str, nn.Module | None]) -> Callable[..., Any]:
    """Return the function with modules in the places of `_ModuleInput`s."""

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, _ModuleInput) for leaf in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map_only(_ModuleInput, lambda m: children[m.name], (args, kwargs))
        return function(*args, **kwargs)

    return forward


@contextlib.contextmanager
def _acting_as(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Let modules, wherever the function holds them, have the attributes of their copies inside the block."""
    before = [(original, vars(original)) for original, _ in pairs]
    try:
        for original, own in pairs:
            object.__setattr__(original, "__dict__", vars(own))
        yield
    finally:
        for original, attributes in before:
            object.__setattr__(original, "__dict__", attributes)


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def as_module(model: Any) -> Any:
    """Return a function as a module, and anything else as it is."""
    if not _is_function(model):
        return model
    own = getattr(model, "func", model)  # of a partial
    name = getattr(own, "__name__", type(own).__name__)
    return type(name, (FunctionModule,), {"__module__": __name__})(model)  # so that plans have its name


def _is_function(model: Any) -> bool:
    """Return whether a value has Python code that can be called, and is neither a module nor a class."""
    return callable(model) and not isinstance(model, (nn.Module, type, BuiltinFunctionType))
