"""Hashable snapshots of Python values: contents of containers, exact floats, and objects by number.

    [1.0, {"a": x}]      ("list", (("float", 1.0), ("dict", (("str", "a"), ("Thing", "object 0")))))

A container that stays the same object may have changed by the next call, so contents are compared.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import itertools
import math
import pickle
import queue
import random
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_, length_hint
from typing import Any

import numpy as np
import torch

ABSENT = object()
"""Placeholder for an attribute that does not exist."""

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_LISTS = (list, tuple, deque)
_DICTS = (dict, OrderedDict, defaultdict)
_SETS = (set, frozenset)
_CONTAINERS = (*_LISTS, *_DICTS, *_SETS)


class Objects:
    """Numbers for objects in the order of their first use: equal on ranks that meet the same objects."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Any]] = {}

    def token(self, value: Any) -> tuple[str, Any]:
        """Return a type name and a value equal on all ranks: the value, contents, or an object's number."""
        kind = type(value)
        if value is ABSENT:
            return "absent", ""
        if isinstance(value, _PLAIN):
            return kind.__name__, spelled(value)
        if isinstance(value, _Frozen):
            return value.kind, tuple(map(self.token, value.items))
        if kind in _CONTAINERS:
            return kind.__name__, tuple(map(self.token, _items(value)))
        number, _ = self._known.setdefault(id(value), (len(self._known), value))
        return kind.__name__, f"object {number}"


def spelled(value: Any) -> Any:
    """Return a plain value to be compared by `==`: -0.0 must differ from 0.0, and nan must equal nan."""
    if type(value) is float and (value != value or (value == 0 and math.copysign(1.0, value) < 0)):
        return repr(value)
    return value


def equal(a: Any, b: Any) -> bool:
    """Return whether eager code could not tell `a` from `b`; torch.export replaces containers by copies."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, _Frozen):
        return a.kind == b.kind and len(a.items) == len(b.items) and all(map(equal, a.items, b.items))
    if type(a) in _CONTAINERS:
        return len(a) == len(b) and all(map(equal, _items(a), _items(b)))
    return isinstance(a, _PLAIN) and bool(spelled(a) == spelled(b))


def _items(container: Any) -> list[Any]:
    if type(container) in _DICTS:
        return [x for pair in container.items() for x in pair]
    return (
        sorted(container, key=lambda x: (type(x).__name__, repr(x)))
        if type(container) in _SETS
        else list(container)
    )


class _Frozen:
    """Contents of a container or array at one moment."""

    __slots__ = ("items", "kind")

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__
        if isinstance(value, np.ndarray):
            self.items: list[Any] = [str(value.dtype), *value.shape, value.tobytes()]
        else:
            self.items = [frozen(item) for item in _items(value)]


def frozen(value: Any) -> Any:
    """Return the current contents of a container or array; any other value is returned unchanged."""
    return _Frozen(value) if is_container(value) else value


def is_container(value: Any) -> bool:
    """Return whether a value may change its contents while it stays the same object."""
    return type(value) in _CONTAINERS or (isinstance(value, np.ndarray) and value.dtype != object)


class Snapshot:
    """Snapshot of one place; `value` returns the same object until the contents change."""

    __slots__ = ("_arrays", "_flat", "_value")

    def __init__(self, now: Any) -> None:
        self._flat, self._arrays = _flattened(now)
        self._value = frozen(now)

    def value(self, now: Any) -> Any:
        """Return the snapshot of the current contents."""
        flat, arrays = _flattened(now)
        same = len(flat) == len(self._flat) and all(map(is_, flat, self._flat)) and arrays == self._arrays
        if not same:
            self._flat, self._arrays, self._value = flat, arrays, frozen(now)
        return self._value


class ValueSnapshot:
    """Restorable snapshot of a value: the contents of containers and arrays, also of user-defined classes.

    The position of an iterator and the state of a random generator cannot be restored, but changes are
    detected.
    """

    __slots__ = ("_at", "_parts", "value")

    def __init__(self, value: Any) -> None:
        self.value, self._at = value, _position(value)
        self._parts: list[tuple[Any, Any, Any]] = []
        todo, seen = [value] if isinstance(value, FILLED) else [], set[int]()
        while todo:
            one = todo.pop()
            if id(one) not in seen and not isinstance(one, torch.Size):
                seen.add(id(one))
                kind = next(kind for kind in FILLED if isinstance(one, kind))
                self._parts.append((one, kind, _copied(one, kind)))
                todo.extend(x for x in _plain_items(one) if isinstance(x, FILLED))

    def is_changed(self, now: Any) -> bool:
        """Return whether `now`, the value's replacement, differs from the value or has different contents."""
        same = now is self.value or equal(now, self.value)
        same = same and _position(now) == self._at
        return not same or not all(_holds(one, was, equal) for one, _, was in self._parts)

    def put_back(self) -> None:
        """Restore the contents of containers and arrays."""
        for one, kind, was in self._parts:
            if _holds(one, was, is_):
                continue
            if kind is np.ndarray:
                one[...] = was
            elif kind in _MUTABLE:
                kind.clear(one)
                (kind.extend if kind in (list, deque) else kind.update)(one, was)


_MUTABLE: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
_SEQUENCES: tuple[Any, ...] = (list, tuple)
FILLED: tuple[Any, ...] = (*_MUTABLE, tuple, frozenset, np.ndarray)
"""Classes with contents."""


def _position(value: Any) -> Any:
    """Return what changes as a value is used that cannot be restored; None of other values."""
    if isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        return value.gi_frame.f_lasti, [*map(id, value.gi_frame.f_locals.values())]
    if isinstance(value, itertools.count):
        return repr(value)
    if type(value) is random.Random:
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)  # the state may hold arrays
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    if isinstance(value, threading.local):
        return [(name, _token(held)) for name, held in vars(value).items()]
    if isinstance(value, contextvars.ContextVar):
        return _token(value.get(None))
    if isinstance(value, (queue.Queue, queue.SimpleQueue)):
        return value.qsize()
    if isinstance(value, io.IOBase):
        with contextlib.suppress(OSError, ValueError):  # a pipe, or a closed file
            return value.tell()
    return length_hint(value, 0) if isinstance(value, Iterator) else None


def _copied(one: Any, kind: Any) -> Any:
    if kind is np.ndarray:
        return one.copy()
    return kind(_plain_items(one) if kind in _SEQUENCES else one)


def _token(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def _holds(one: Any, was: Any, same: Callable[[Any, Any], bool]) -> bool:
    if isinstance(one, np.ndarray):
        return one.shape == was.shape and bool(one.tobytes() == was.tobytes())
    if isinstance(one, (set, frozenset)):
        return bool(one == was)
    now, before = list(_plain_items(one)), list(_plain_items(was))
    return len(now) == len(before) and all(map(same, now, before))


def _flattened(value: Any) -> tuple[list[Any], list[bytes]]:
    """Return all values inside a value, from outside to inside, and the bytes of arrays."""
    flat: list[Any] = []
    arrays: list[bytes] = []
    todo = [value]
    while todo:
        one = todo.pop()
        kind = type(one)
        flat.append(kind if kind in _CONTAINERS else one)
        if kind in _CONTAINERS:
            items: Iterable[Any] = _plain_items(one)
            flat.append(len(one))
            todo.extend(items)
        elif kind is np.ndarray and one.dtype != object:
            arrays.append(one.tobytes())
    return flat, arrays


def _plain_items(container: Any) -> Iterable[Any]:
    if isinstance(container, np.ndarray):
        return ()
    if isinstance(container, dict):
        return (x for pair in container.items() for x in pair)
    for kind in _SEQUENCES:  # a class of the user's may have no len()
        if isinstance(container, kind):
            return kind.__iter__(container)  # type: ignore[no-any-return]
    return container  # type: ignore[no-any-return]
