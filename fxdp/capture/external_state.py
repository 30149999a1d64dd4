"""External Python state that a model's code may read: all state outside of module attributes.

    self.config.scale        forward -> "config", "scale"    the fields of objects that modules hold
    SCALE, helper(z)         forward -> globals              of the user's code, and what functions there read
    nonlocal_scale           forward -> cells, defaults      of closures, methods, partials, hooks and losses
    type(self).scale         forward -> its class            methods and attributes of the user's classes

Reads of Python values cannot be observed while a model is captured. So the bytecode is scanned: an attribute
counts if the name occurs in code that can be reached from a forward. Code of torch, of Python and of trainers
is not scanned. Code of all other installed packages is scanned but counts as constant: only the fields of
objects of these packages may change.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fxdp.capture.bytecode_names import names_of, texts_of
from fxdp.capture.external_places import ExternalPlace, Fields, ReadState
from fxdp.capture.snapshot import ABSENT
from fxdp.settings import variables_of_user
from fxdp.torch_compat import HOOKS

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_FOREIGN = sys.stdlib_module_names | {
    "torch", "fxdp", "numpy", "sympy", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning",
    "ray",
}  # fmt: skip
_TRAINERS = ("transformers.trainer", "transformers.training_args")  # their objects change at each step
_NEVER = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__reduce__", "__setstate__"})
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor)
_ROUNDS = 6
"""Limit of the fixed-point iteration: names lead to more code, and code to more names.

In practice no names that matter are missing after this number of rounds.
"""


def external_state(
    model: nn.Module, others: Iterable[tuple[str, Any]] = (), *, constant_packages: bool = True
) -> ReadState:
    """Return the external state that the model's code may read, and the code of a loss or of inputs.

    Without `constant_packages` the code of installed packages counts as the user's, as does code made by
    `exec`.
    """
    known = _Reached(frozenset(), frozenset())
    for _ in range(_ROUNDS):
        reached = _Reached(known.found, known.asked, constant_packages=constant_packages)
        reached.roots(model, others)
        if reached.found == known.found and reached.asked == known.asked:
            break
        known = reached
    places = tuple(reached.places.values())
    return ReadState(places, known.found, tuple(reached.objects), tuple(reached.codes), tuple(reached.caches))


def _is_cache(value: Any) -> bool:
    """Return whether a value is a function wrapped by `functools.lru_cache` or `cache`."""
    return isinstance(value, functools._lru_cache_wrapper)


def _is_foreign(module: str | None) -> bool:
    """Return whether code and classes of a Python module are library code, which counts as constant.

    Libraries here are torch, fxdp, the standard library, and trainers.
    """
    if module is None or module.startswith(_TRAINERS):
        return True
    return module != "__main__" and module.partition(".")[0] in _FOREIGN


_INSTALLED = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=65536)
def _is_installed(module: str | None) -> bool:
    """Return whether a Python module is an installed package, with code and globals that never change."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return any(folder in file for folder in _INSTALLED)


@dataclass
class _Reached:
    """One walk from the model over all objects that its code can reach by the attributes in `names`."""

    names: frozenset[str]
    asks: frozenset[str]
    found: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    places: dict[tuple[int, Any], ExternalPlace] = field(default_factory=dict)
    objects: list[tuple[str, Mapping[str, Any], Any]] = field(default_factory=list)
    codes: dict[types.CodeType, None] = field(default_factory=dict)
    caches: list[Any] = field(default_factory=list)
    constant_packages: bool = True
    _seen: dict[int, Any] = field(default_factory=dict)
    _own: frozenset[int] = frozenset()
    _todo: deque[tuple[str, Any]] = field(default_factory=deque)

    def roots(self, model: nn.Module, others: Iterable[tuple[str, Any]]) -> None:
        """Walk from the modules of the model, and from a loss or inputs."""
        modules = list(model.named_modules())
        self._own = frozenset(id(module) for _, module in modules)
        for path, module in modules:
            self._module(path or "the model", module)
        for key in sorted(self.names & vars(nn.functional).keys()):  # users replace these functions
            self._place(f"{key} of torch.nn.functional", vars(nn.functional), key)
        self._todo.extend(others)
        while self._todo:
            self._value(*self._todo.popleft())

    def _module(self, path: str, module: nn.Module) -> None:
        self._class(type(module))
        everything = _is_foreign(type(module).__module__)
        for name, value in vars(module).items():
            if name in HOOKS:
                self._todo.extend((f"a hook of {path}", hook) for hook in value.values())
            elif name not in _TORCHS and (everything or name in self.names):
                self._todo.append((f"{name} of {path}", value))

    def _place(self, name: str, owner: Any, key: Any, holder: Any = None, *, fixed: bool = False) -> None:
        """Record a place and follow the value there; if the place is `fixed`, only follow code."""
        if fixed:
            value = owner.get(key, ABSENT)
            if isinstance(value, _CODE) or _is_cache(value):
                self._todo.append((name, value))
            return
        place = ExternalPlace(name, owner, key, owner if holder is None else holder)
        if place.known_by not in self.places:
            self.places[place.known_by] = place
            if (value := place.value()) is not ABSENT:
                self._todo.append((name, value))

    def _value(self, name: str, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            if id(value) not in self._own:
                self._hidden(name, value)
        elif isinstance(value, (Mapping, *_CONTAINERS)):
            self._snapshot(name, value)
        elif isinstance(value, types.FunctionType):
            self._function(name, value)
            self._wrapped(name, value)
        elif isinstance(value, types.MethodType):
            self._todo.extend([(name, value.__func__), (f"the object of {name}", value.__self__)])
        elif isinstance(value, functools.partial):
            for key in ("func", "args", "keywords"):
                self._place(f"{key} of {name}", Fields(value), key, value)
        elif isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
            inner = (getattr(value, key, None) for key in ("fget", "__func__", "func"))
            self._todo.extend((name, one) for one in inner if one is not None)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._python_module(value)
        elif _is_cache(value):
            self.caches.append(value)
            self._wrapped(name, value)
        elif not isinstance(value, np.ndarray):
            self._object(name, value)

    def _wrapped(self, name: str, function: Any) -> None:
        """Follow the original of a function that torch's or Python's decorators have wrapped."""
        if "__wrapped__" in vars(function):
            self._todo.append((name, function.__wrapped__))

    def _snapshot(self, name: str, value: Any) -> None:
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            if not isinstance(item, _ATOMS):
                self._todo.append((f"{name}[{key!r}]" if isinstance(key, (int, str)) else name, item))
        if not _is_foreign(type(value).__module__):
            self._object(name, value)

    def _function(self, name: str, function: types.FunctionType) -> None:
        names_of_modules = function.__module__, function.__globals__.get("__name__")
        nameless = names_of_modules[1] is None and not self.constant_packages  # made by `exec`
        if not nameless and any(map(_is_foreign, names_of_modules)):
            return
        code, own = function.__code__, function.__qualname__
        self.codes[code] = None
        fixed = self.constant_packages and _is_installed(function.__globals__.get("__name__"))
        names = names_of(code)
        self.found |= names.read
        self.asked |= names.asked
        for key in ("__code__", "__defaults__", "__kwdefaults__"):
            self._place(f"{key} of {own}", Fields(function), key, function, fixed=fixed)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if free != "__class__":
                self._place(f"{free} of {own}", Fields(cell), "cell_contents", cell, fixed=fixed)
        for wanted in names.globals:
            if wanted in function.__globals__:
                self._place(f"the global {wanted}", function.__globals__, wanted, fixed=fixed)
        if {"environ", "getenv"} & names.read:
            self._environment(code)
        for key in vars(function):
            self._place(f"{key} of {own}", vars(function), key, fixed=fixed)

    def _environment(self, code: types.CodeType) -> None:
        for text in texts_of(code):
            self._place(f"the environment's {text}", variables_of_user(), text)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen and self._seen[id(kind)] is ABSENT:
            return
        self._seen[id(kind)] = ABSENT
        inherited: dict[str, None] = {}
        for base in reversed(kind.__mro__):  # assigning to a class may also override an inherited attribute
            own, fixed = vars(base), _is_installed(base.__module__)
            for key in own:
                implied = key.startswith("__") and callable(own[key]) and not isinstance(own[key], type)
                if (key in self.names or key == "forward" or implied) and key not in _NEVER:
                    inherited.setdefault(key)
            if not fixed and not _is_foreign(base.__module__):
                self.objects.append((f"class {base.__name__}", own, base))
            for key in () if _is_foreign(base.__module__) else inherited:
                if key in own or not key.startswith("__"):
                    self._place(f"{key} of class {base.__name__}", own, key, base, fixed=fixed)

    def _python_module(self, module: types.ModuleType) -> None:
        if not _is_foreign(module.__name__) and not _is_installed(module.__name__):
            for key in [key for key in vars(module) if key in self.names]:
                self._place(f"{key} of {module.__name__}", vars(module), key)

    def _object(self, name: str, value: Any) -> None:
        kind = type(value)
        if _is_foreign(kind.__module__) and kind not in _PLAIN_OBJECTS:
            return
        self._class(kind)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.objects.append((name, own, own))
            for key in [key for key in own if key in self.names]:
                self._place(f"{key} of {name}", own, key)
            for key in sorted(self.asks - own.keys()):
                if not hasattr(kind, key):
                    self._place(f"{key} of {name}", own, key)
        for key in _attributes_of(kind):
            if key in self.names:
                self._place(f"{key} of {name}", Fields(value), key, value)

    def _hidden(self, name: str, module: nn.Module) -> None:
        """Follow a module that a list or an object holds, and that is not a submodule of the model."""
        self._class(type(module))
        for key in vars(module):
            if key in _REGISTRIES or key == "training" or key in HOOKS or key not in _TORCHS:
                self._place(f"{key} of {name}", vars(module), key)


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_TORCHS = frozenset(vars(nn.Module()))
_CODE = (types.FunctionType, types.MethodType, functools.partial, type, property, staticmethod, classmethod)
"""Classes of values that contain code."""
_PLAIN_OBJECTS = (types.SimpleNamespace,)


def _attributes_of(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        specs = vars(base).get("__slots__", ())
        yield from (specs,) if isinstance(specs, str) else specs
