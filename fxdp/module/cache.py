"""`LRU`: a cache of a limited size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LRU(Generic[_K, _V]):
    """At most `limit` entries; a new entry replaces the least recently used one.

    Ranks that look up and store equal keys in the same order keep equal entries.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[_K, _V] = OrderedDict()

    def get(self, key: _K) -> _V | None:
        """Return the value of a key or None; this counts as a use."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def __setitem__(self, key: _K, value: _V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def __contains__(self, key: _K) -> bool:
        return self.get(key) is not None

    def items(self) -> Iterable[tuple[_K, _V]]:
        """Return the entries, least recently used first; this counts as no use."""
        return self._entries.items()

    def __len__(self) -> int:
        return len(self._entries)
