"""Namespaces keep skip tensors of the same name apart."""

from __future__ import annotations

import functools
import itertools
import uuid
from abc import ABCMeta

_numbers = itertools.count()


@functools.total_ordering
class Namespace(metaclass=ABCMeta):  # noqa: B024 - abstract only to register None
    """A unique name that skips can be put under with `isolate`.

    Namespaces are hashable and ordered by their making. A copy is equal to its original, in this process or
    in another one. `None` is the default namespace: it counts as an instance and comes before all others.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        # the number orders alike on all ranks, the uuid keeps namespaces of several processes apart
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
