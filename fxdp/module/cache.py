"""What is kept of the programs of one model: by kind of call, those used last.

Two calls are of one kind if they differ in sizes alone. A Python value on which the model decides is part of
the kind, so a model that is given a fresh object at each call would fill the memory with programs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from fxdp.module.call import Call, ProgramKey

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_KINDS = 64  # kinds whose programs are kept


class LRU(Generic[K, V]):
    """At most `limit` entries; a new one takes the place of that which was not used for longest.

    Ranks that look up and store the same keys in the same order keep the same entries.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of the key, which counts as a use, or None."""
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
        """The entries, least recently used first; none counts as used by this."""
        return self._entries.items()

    def __len__(self) -> int:
        return len(self._entries)


class Kinds(Generic[V]):
    """The kinds that were called last; all ranks keep the same ones, as they make the same calls."""

    def __init__(self) -> None:
        self._kinds: LRU[ProgramKey, V] = LRU(_KINDS)

    def __iter__(self) -> Iterator[V]:
        """The least recently called first."""
        return (kind for _, kind in self._kinds.items())

    def find(self, call: Call) -> V | None:
        """What there is for calls of this kind."""
        return self._kinds.get(call.kind)

    def add(self, call: Call, kind: V) -> None:
        """Keep what was captured for a call of a new kind."""
        self._kinds[call.kind] = kind

    def alike(self, call: Call) -> tuple[ProgramKey, ...]:
        """The kinds that differ from the call's in Python values alone, the one called last at the end."""
        return tuple(key for key, _ in self._kinds.items() if key.differs_in_values_alone(call.kind))
