"""The places of Python that a model's code may read, as values: what is there, and putting it back."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from fxdp.capture.bytecode_names import location_of_change
from fxdp.capture.snapshot import ABSENT
from fxdp.ir.metadata import Location


@dataclass(frozen=True, slots=True)
class ExternalPlace:
    """Where a value is read: `owner.get(key, ABSENT)`."""

    name: str
    owner: Any
    key: Any
    holder: Any
    """What has it: the owner itself, or what the owner stands for."""

    @property
    def label(self) -> str:
        """How the code calls it."""
        return self.name.removeprefix("the global ").partition(" ")[0]

    @property
    def known_by(self) -> tuple[int, Any]:
        """What is equal for the same place alone."""
        return id(self.holder), self.key

    def value(self) -> Any:
        """What is there."""
        return self.owner.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        """Put something there."""
        if self.holder is not self.owner:
            delattr(self.holder, self.key) if value is ABSENT else setattr(self.holder, self.key, value)
        elif value is ABSENT:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = value


class Fields:
    """The attributes of something without a dict of them, to be read like one."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute."""
        try:
            return getattr(self.of, key, default)
        except ValueError:  # of an empty cell
            return default


@dataclass(frozen=True, repr=False)
class ReadState:
    """What a model's code may read of Python beside its modules' attributes."""

    places: tuple[ExternalPlace, ...] = ()
    names: frozenset[str] = frozenset()
    """The names of all that it reads."""
    objects: tuple[tuple[str, dict[str, Any]], ...] = ()
    """The attributes of the objects among it, by the objects' names."""
    codes: tuple[types.CodeType, ...] = ()
    """The code itself."""
    caches: tuple[Any, ...] = ()
    """The functions among it whose results Python keeps."""

    def has_constant(self, value: str) -> bool:
        """Whether the code spells this value out."""
        return any(value in code.co_consts for code in self.codes)

    def location_of_change(self, name: str) -> Location:
        """Where the code gives something of this name another value."""
        return location_of_change(self.codes, name)
