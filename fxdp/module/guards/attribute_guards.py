"""`AttributeGuards`: attributes, hooks and classes of a model's modules, and values that their code reads.

Eager code sees at once a change that the user makes between two calls (`model.beta = 0.5`, a hook). A program
does not, so each call compares the identities of a few hundred objects. Buffers whose values a program was
made for (`capture/patches/module_state.py`) are guarded like attributes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import eq, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fxdp.capture.external_places import Fields, ReadState
from fxdp.capture.python_values import AttributeNumber
from fxdp.capture.refusals.stateful import own_attributes
from fxdp.capture.snapshot import ABSENT, Objects, Snapshot, equal, frozen, is_container
from fxdp.module.guards.values import fits
from fxdp.torch_compat import HOOKS, global_hook_registries, global_hooks

Key: TypeAlias = "tuple[tuple[str, tuple[str, Any]], ...]"
"""The attributes that differ from those of the beginning: name, type and value."""

_SPOKEN = [kind.replace("_", " ") for kind in HOOKS]


class AttributeGuards:
    """Guards on a model (and on a loss that is a module) since the construction of this object.

    The result of `changed` depends on `reads` alone: equal readings give an equal result.
    """

    def __init__(self, *roots: nn.Module) -> None:
        named = [(name, module) for root in roots for name, module in root.named_modules()]
        modules = [module for _, module in named]
        self._named, self._modules = named, modules
        self._sizes = self._count()
        self._numbers: dict[int, _Number] = {}
        self._hooks = [vars(m)[kind] for m in modules for kind in HOOKS]
        self._kept_hooks, self._kept_classes = _Kept(), _Kept()
        self._specs: list[tuple[Any, Any]] = [(vars(m), name) for m in modules for name in own_attributes(m)]
        self._names = [f"{name} of {path or 'the model'}" for path, m in named for name in own_attributes(m)]
        self._places: dict[str, tuple[Any, Any]] = {}
        self._names += [f"number of{kind} of {path or 'the model'}" for path, _ in named for kind in _SPOKEN]
        self._names += ["hooks of the modules", "classes of the modules"]
        self._taken = dict.fromkeys(self._names, 1)
        self._read = frozenset[str]()
        self._known = {(id(owner), key): i for i, (owner, key) in enumerate(self._specs)}
        self._outside: set[int] = set()
        self._read_in, self._snapshot = set[int](), dict[int, Snapshot]()
        self._objects = Objects()
        self._first = self._values()
        self._last = list(self._first)
        self._last_key: Key = ()
        self._changed: dict[int, tuple[str, tuple[str, Any]]] = {}
        self._reads: tuple[Reading, ...] | None = None

    @property
    def reads(self) -> tuple[Reading, ...]:
        """The reads of `changed`; a new tuple after a place was added or removed."""
        if self._reads is None:
            self._reads = tuple(self._all_reads())
        return self._reads

    def _all_reads(self) -> Iterator[Reading]:
        hooks = [*self._hooks, *global_hook_registries()]
        yield Reading(partial(map, len, [*map(vars, self._modules), *hooks]), eq)
        yield Reading(partial(chain.from_iterable, hooks), eq)
        yield Reading(partial(map, type, self._modules))
        getters = [(_getter(owner), owner, key) for owner, key in self._specs]
        for getter in dict.fromkeys(getter for getter, _, _ in getters):
            owners = [owner.of if getter is getattr else owner for own, owner, _ in getters if own is getter]
            keys = [key for own, _, key in getters if own is getter]
            yield Reading(partial(map, getter, owners, keys, repeat(ABSENT)))
        if self._snapshot:
            yield Reading(self._contents)
        if self._numbers:
            yield Reading(partial(map, _Number.value, tuple(self._numbers.values())))

    def _contents(self) -> list[Any]:
        """Return the contents of the containers at guarded places."""
        specs = ((snapshot, *self._specs[i]) for i, snapshot in self._snapshot.items())
        return [snapshot.value(owner.get(key, ABSENT)) for snapshot, owner, key in specs]

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """Guard the values of these tensors like attributes from now on."""
        self._reads = None
        for name, tensor in tensors.items():
            if id(tensor) not in self._numbers:
                number = self._numbers[id(tensor)] = _Number(tensor)
                self._names.append(self._unlike_others(name))
                self._first = [*self._first, number.value()]
                self._last = [*self._last, number.value()]

    def watch_read(self, read: ReadState, written: Collection[tuple[int, Any]] = ()) -> None:
        """Guard all that the model's code may read from now on, but not the places that the code writes.

        A counter of the model's own calls would differ after each call.
        """
        self._read = read.names
        for place in read.places:
            if place.known_by not in self._known:
                self._outside.add(self._insert(place.owner, place.key, place.name, place.known_by))
        for at in written:
            if self._known.get(at) in self._outside:
                self._forget(self._known[at])
        for i, (owner, key) in enumerate(self._specs):
            if i not in self._read_in and (i in self._outside or key in self._read):
                self._read_in.add(i)
                self._look_into(i, owner.get(key, ABSENT))

    def _look_into(self, i: int, now: Any) -> Any:
        """Guard the contents of a container at this place from now on; return the present value."""
        if not is_container(now):
            return now
        self._reads = None
        self._snapshot[i] = Snapshot(now)
        found = self._last[i] = self._snapshot[i].value(now)
        self._first[i] = found if self._first[i] is now else frozen(self._first[i])
        return found

    def _forget(self, i: int) -> None:
        self._reads = None
        self._specs[i] = {}, self._specs[i][1]
        self._places.clear()
        self._first[i] = self._last[i] = ABSENT
        self._snapshot.pop(i, None)
        self._changed.pop(i, None)

    def changed(self) -> Key:
        """Return the Python attributes that differ from the beginning; each combination needs a program."""
        if self._count() != self._sizes:
            self._watch_new()
        values = self._values()
        if not all(map(is_, values, self._last)):
            self._note_changes(values)
        return self._last_key

    def _note_changes(self, values: list[Any]) -> None:
        """Compare the attributes that are different objects than at the last call; others are equal."""
        for i, (now, last) in enumerate(zip(values, self._last, strict=True)):
            if now is not last:
                if i in self._read_in and i not in self._snapshot:
                    now = values[i] = self._look_into(i, now)
                self._changed.pop(i, None)
                if not equal(now, self._first[i]):
                    self._changed[i] = self._names[i], self._objects.token(now)
        self._last = values
        self._last_key = tuple(self._changed[i] for i in sorted(self._changed))

    def first(self, name: str) -> tuple[str, Any]:
        """Return the type and the value that an attribute had at the beginning."""
        return self._objects.token(self._first[self._names.index(name)])

    def number(self, name: str) -> AttributeNumber | None:
        """Return an attribute that is a number now; None if it is not on a module, or not a number."""
        if len(self._places) != len(self._specs):  # looked up at each call, so by name
            self._places = dict(zip(self._names, self._specs, strict=False))
        owner, key = self._places.get(name, ({}, name))
        if type(owner) is not dict or "__builtins__" in owner:  # the globals of a module are everybody's
            return None
        return AttributeNumber(name, owner, key, owner[key]) if fits(owner.get(key)) else None

    def _count(self) -> list[int]:
        return [len(vars(module)) for _, module in self._named]

    def _watch_new(self) -> None:
        """Guard attributes added since, if the code reads their names or the classes define them.

        The forward cannot have read any further new attribute when it was captured.
        """
        self._sizes = self._count()
        for path, module in self._named:
            for name in own_attributes(module):
                known = (id(vars(module)), name) in self._known
                if not known and (hasattr(type(module), name) or name in self._read):
                    before = getattr(type(module), name, ABSENT)
                    known_by = id(vars(module)), name
                    self._insert(vars(module), name, f"{name} of {path or 'the model'}", known_by, before)

    def _insert(self, owner: Any, key: Any, name: str, known_by: tuple[int, Any], *before: Any) -> int:
        """Guard one more place, listed before the hooks and buffers."""
        self._reads = None
        self._known[known_by] = at = len(self._specs)
        self._specs.append((owner, key))
        self._names.insert(at, self._unlike_others(name))
        first = before[0] if before else owner.get(key, ABSENT)
        self._first.insert(at, first)
        self._last.insert(at, first)
        self._changed = {i + (i >= at): row for i, row in self._changed.items()}
        return at

    def _unlike_others(self, name: str) -> str:
        """Return a unique name for a place; keys identify places by name."""
        self._taken[name] = count = self._taken.get(name, 0) + 1
        return name if count == 1 else f"{name} ({count})"

    def _values(self) -> list[Any]:
        own = [attributes.get(name, ABSENT) for attributes, name in self._specs]
        for i, snapshot in self._snapshot.items():
            own[i] = snapshot.value(own[i])
        hooks = self._kept_hooks.value([*chain.from_iterable(self._hooks), *global_hooks()])
        classes = self._kept_classes.value([*map(type, self._modules)])
        return [*own, *map(len, self._hooks), hooks, classes, *(n.value() for n in self._numbers.values())]


def _getter(owner: Any) -> Any:
    """Return the function that reads a key of an owner with a default, written in C if possible."""
    if type(owner) is dict:
        return dict.get
    if type(owner) is types.MappingProxyType:
        return types.MappingProxyType.get
    # reading an empty cell raises ValueError, which getattr does not replace by the default
    is_plain = type(owner) is Fields and type(owner.of) is not types.CellType
    return getattr if is_plain else _get


def _get(owner: Any, key: Any, default: Any) -> Any:
    return owner.get(key, default)


class _Kept:
    """One object per list, equal lists share it: hooks have different ids on different ranks."""

    def __init__(self) -> None:
        self._now: list[Any] = []
        self._known: dict[tuple[Any, ...], object] = {}
        self._value = self._known[()] = object()

    def value(self, now: list[Any]) -> object:
        """Return the object of this list."""
        if now != self._now:
            self._now, self._value = now, self._known.setdefault(tuple(now), object())
        return self._value


class _Number:
    """A buffer, read again after a write; on CPU at each call, as a write into `.data` is not counted."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._version, self._value = buffer._version, (buffer.tolist(),)

    def value(self) -> tuple[Any, ...]:
        """Return the contents; the same object while they are equal."""
        if self._buffer._version != self._version or self._buffer.device.type == "cpu":
            self._version, now = self._buffer._version, (self._buffer.tolist(),)
            if now != self._value:
                self._value = now
        return self._value


class Reading(NamedTuple):
    """How a guard reads its items, and how it compares two readings of one item."""

    read: Callable[[], Iterable[Any]]
    same: Callable[[Any, Any], Any] = is_

    def now(self) -> Comparison:
        """Return the guard that all items stay as they are now."""
        return Comparison(self.read, self.same, [*self.read()])


class Comparison(NamedTuple):
    """A guard: items are read and must equal the expected ones, one by one; their number is fixed.

    Comparison(partial(map, len, registries), eq, [2, 0, 1])      as many parameters, ... as before
    Comparison(partial(map, type, modules), is_, [Linear, ReLU])  modules of the same classes
    """

    read: Callable[[], Iterable[Any]]
    same: Callable[[Any, Any], Any]
    expected: Sequence[Any]


def all_hold(comparisons: Iterable[Comparison]) -> bool:
    """Return whether all guards hold; stop reading at the first guard that fails."""
    for read, same, expected in comparisons:  # noqa: SIM110  (a generator is entered once for each)
        if not all(map(same, read(), expected)):
            return False
    return True
