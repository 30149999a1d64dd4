"""A mapping that keeps what was used last, so that a long run with ever new sizes needs no more memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
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
