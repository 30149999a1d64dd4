"""The cache of a model's programs: the most recently used kinds of calls.

Two calls are of one kind if they differ in sizes alone. A Python value that decides on the program is part of
the kind, so a model with a new object at each call would fill the memory with programs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from fxdp.module.call import ProgramKey

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_KINDS = 64  # kinds with cached programs


class LRU(Generic[K, V]):
    """At most `limit` entries; a new entry replaces the least recently used one.

    Ranks that look up and store equal keys in the same order keep equal entries.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value of a key or None; this counts as a use."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def items(self) -> Iterable[tuple[K, V]]:
        """Return the entries, least recently used first; this counts as no use."""
        return self._entries.items()

    def __len__(self) -> int:
        return len(self._entries)


class Kinds(Generic[V]):
    """The most recently used kinds of calls; equal on all ranks, as all ranks make the same calls."""

    def __init__(self) -> None:
        self._kinds: LRU[ProgramKey, V] = LRU(_KINDS)

    def __iter__(self) -> Iterator[V]:
        """Iterate over the kinds, least recently used first."""
        return (kind for _, kind in self._kinds.items())

    def find(self, key: ProgramKey) -> V | None:
        """Return the programs of a key."""
        return self._kinds.get(key)

    def add(self, key: ProgramKey, kind: V) -> None:
        """Keep the programs of a new key."""
        self._kinds[key] = kind

    def alike(self, key: ProgramKey) -> tuple[ProgramKey, ...]:
        """Return the keys that differ from a key in Python values alone, the last used key at the end."""
        return tuple(other for other, _ in self._kinds.items() if other.differs_in_values_alone(key))
