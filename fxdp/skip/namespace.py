"""Namespaces separate skip tensors of equal names."""

from __future__ import annotations

import functools
import itertools
import uuid
from abc import ABCMeta

_numbers = itertools.count()


@functools.total_ordering
class Namespace(metaclass=ABCMeta):  # noqa: B024 - abstract only to register None
    """A unique scope for the names of skips, assigned with `isolate`.

    Namespaces are hashable and ordered by creation. A copy is equal to the original, also in a different
    process. `None` is the default namespace: it counts as an instance and comes first.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        # the counter gives all ranks one order; the uuid separates namespaces of different processes
        self.id = (next(_numbers), uuid.uuid4())

    def __repr__(self) -> str:
        return f"<Namespace {self.id[0]} {self.id[1]}>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return other is not None and isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: object) -> bool:
        if other is None:
            return False
        return self.id < other.id if isinstance(other, Namespace) else NotImplemented


Namespace.register(type(None))
