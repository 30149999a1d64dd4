"""Places of external Python state that a model's code may read, as values that can be read and restored."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxdp.capture.bytecode_names import location_of_change
from fxdp.capture.snapshot import ABSENT
from fxdp.ir.graph.metadata import Location


@dataclass(frozen=True, slots=True)
class ExternalPlace:
    """A place from which a value is read, as `owner.get(key, ABSENT)`."""

    name: str
    owner: Any
    key: Any
    holder: Any
    """The object that has the value: the owner itself, or the object that the owner stands for."""

    @property
    def label(self) -> str:
        """Return the name by which the code refers to the place."""
        return self.name.removeprefix("the global ").partition(" ")[0]

    @property
    def known_by(self) -> tuple[int, Any]:
        """Return a key that identifies the place."""
        return id(self.holder), self.key

    def value(self) -> Any:
        """Return the current value of the place, or `ABSENT`."""
        return self.owner.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        """Set the value of the place; `ABSENT` deletes the value."""
        if value is ABSENT and self.value() is ABSENT:
            return
        if self.holder is not self.owner:
            delattr(self.holder, self.key) if value is ABSENT else setattr(self.holder, self.key, value)
        elif value is ABSENT:
            del self.owner[self.key]
        else:
            self.owner[self.key] = value


class Fields:
    """A dict-like view of the attributes of an object that has no `__dict__`."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def get(self, key: str, default: Any = None) -> Any:
        """Return the attribute, or `default`."""
        try:
            return getattr(self.of, key, default)
        except ValueError:  # the cell of a closure variable without a value
            return default


@dataclass(frozen=True, repr=False)
class ReadState:
    """External Python state that a model's code may read: all state outside of module attributes."""

    places: tuple[ExternalPlace, ...] = ()
    names: frozenset[str] = frozenset()
    """Names of everything that the code reads."""
    objects: tuple[tuple[str, Mapping[str, Any], Any], ...] = ()
    """Objects and classes that the code may read: name, attributes, and the holder of these."""
    codes: tuple[types.CodeType, ...] = ()
    """Code objects that can be reached from the model's forward."""
    caches: tuple[Any, ...] = ()
    """Functions with cached results (`functools.lru_cache`, `cache`) that the code may call."""

    def has_constant(self, value: str) -> bool:
        """Return whether the code contains `value` as a constant."""
        return any(value in code.co_consts for code in self.codes)

    def location_of_change(self, name: str) -> Location:
        """Return the line at which the code assigns the attribute or variable `name`."""
        return location_of_change(self.codes, name)
