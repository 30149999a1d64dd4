"""Modules that a function's code reaches: the model of `fxdp.compile(function)`.

    def loss(x, y): return F.cross_entropy(net(x), y)      net, of a cell or a global
    trainer.step                                           self.net, of a bound method
    functools.partial(step, net)                           net, also of defaults, lists and dicts

Each has the name of the variable, attribute or parameter that holds it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from fxdp.capture.external_places import ExternalPlace
from fxdp.capture.external_state import external_state

_CONTAINERS = (list, tuple, set, frozenset)


@dataclass(frozen=True)
class ReachedModules:
    """The outermost modules that a function's code reaches, and the places that hold any."""

    modules: Mapping[str, nn.Module]
    places: tuple[ExternalPlace, ...]

    def at_places(self) -> list[Any]:
        """Return all modules at the places now, in a fixed order."""
        return [module for place in self.places for _, module in _modules_at(place)]


def reached_modules(function: Callable[..., Any]) -> ReachedModules:
    """Return the modules that a function's code can name, sorted by name; a module counts once.

    A module inside of another one that is reached, too, belongs to that one.
    """
    held: list[tuple[str, nn.Module]] = []
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        held.append(("self", owner))
    places: list[ExternalPlace] = []
    inside: set[int] = set()
    for place in external_state(nn.Module(), [("the function", function)], constant_packages=False).places:
        if id(place.owner) in inside:
            continue  # an attribute of a module that was reached before
        found = list(_modules_at(place))
        if found:
            places.append(place)
            held += found
            inside |= {id(vars(child)) for _, module in found for child in module.modules()}
    unique = {id(module): (name, module) for name, module in reversed(held)}
    parts = {id(part) for _, module in unique.values() for part in list(module.modules())[1:]}
    outermost = sorted((row for row in unique.values() if id(row[1]) not in parts), key=lambda row: row[0])
    return ReachedModules(_named(outermost), tuple(places))


def _named(found: list[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    named: dict[str, nn.Module] = {}
    for name, module in found:
        name = name if name.isidentifier() else "module"
        while name in named or hasattr(nn.Module, name):
            name += "_"
        named[name] = module
    return named


def _modules_at(place: ExternalPlace) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a place holds, by itself or in containers, with names."""
    value = place.value()
    if place.key in ("__defaults__", "__kwdefaults__"):
        yield from _among(dict(_defaults(place.holder)), "")
    elif isinstance(place.holder, functools.partial) and place.key == "args":
        yield from _among(dict(zip(_parameters(place.holder.func), value, strict=False)), "")
    elif isinstance(place.holder, functools.partial):
        yield from _among(value, "")
    else:
        yield from _among(value, place.label)


def _among(value: Any, name: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif isinstance(value, MethodType):
        yield from _among(value.__self__, name) if isinstance(value.__self__, nn.Module) else ()
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _among(one, f"{name}_{key}" if name else str(key))
    elif isinstance(value, _CONTAINERS):
        for i, one in enumerate(value):
            yield from _among(one, f"{name}_{i}")


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return []


def _defaults(function: Any) -> Iterator[tuple[str, Any]]:
    positional, default = _parameters(function), function.__defaults__ or ()
    count = function.__code__.co_argcount
    yield from zip(positional[count - len(default) : count], default, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
