"""Changes of a model between two calls: of tensors (`TensorGuards`), attributes and hooks (`ModelGuards`).

Eager code sees at once what the user changes between two calls (`model.beta = 0.5`, a hook). A program does
not, so each call asks here, by comparing the identities of a few hundred objects. Buffers whose values a
program was made for (`capture/patches/module_state.py`) are watched like attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from operator import getitem, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxdp.capture.external_places import ReadState
from fxdp.capture.python_values import AttributeNumber
from fxdp.capture.refusals.stateful import own_attributes
from fxdp.capture.snapshot import ABSENT, Objects, Snapshot, equal, frozen, is_container
from fxdp.ir.model_tensors import all_local, local_of
from fxdp.module.values import fits
from fxdp.torch_compat import global_hooks

Key: TypeAlias = "tuple[tuple[str, tuple[str, Any]], ...]"
"""The attributes that differ from those of the beginning: name, type and value."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SPOKEN = [kind.replace("_", " ") for kind in _HOOKS]

_Layout: TypeAlias = "tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]"


class TensorGuards:
    """The parameters, buffers and modules of a model, and of a loss that is a module, as they were.

    Values that change in place are none of its business: programs read them from the same tensors. But
    `model.bfloat16()` or `model.to(memory_format=...)` leaves the tensors and changes what is in them.
    """

    def __init__(self, *roots: Any) -> None:
        registries = [row for root in roots if isinstance(root, nn.Module) for row in _registries(root)]
        found = [(f"{path}.{key}".lstrip("."), owner, key) for path, owner in registries for key in owner]
        self._registries, self._dicts = registries, [owner for _, owner in registries]
        self._counts = self._count()
        self._names = [name for name, _, _ in found]
        self._owners = [owner for _, owner, _ in found]
        self._keys = [key for _, _, key in found]
        self._values = [owner[key] for _, owner, key in found]
        self._kept = [value for value in self._values if _has_memory(value)]
        self._tensors = list(map(local_of, self._kept))
        # a DTensor can stay the same object and get another shard; a plain tensor is its own memory
        shards = [(v, t) for v, t in zip(self._kept, self._tensors, strict=True) if v is not t]
        self._sharded, self._shards = [v for v, _ in shards], [t for _, t in shards]
        self._layouts = list(map(_layout, self._tensors))
        self._places = self._find_places()

    def unchanged(self) -> bool:
        """Whether all are the same objects, of the same types and strides; called at each step."""
        if self._count() != self._counts:
            return False
        try:
            same = all(map(is_, map(getitem, self._owners, self._keys), self._values))
        except KeyError:
            return False
        return same and all(map(is_, all_local(self._sharded), self._shards)) and self._are_laid_out_alike()

    def changes(self) -> list[str]:
        """The names of those that were replaced, converted or deleted."""
        before = zip(self._kept, self._tensors, self._layouts, strict=True)
        converted = {id(v) for v, t, layout in before if local_of(v) is not t or _layout(t) != layout}
        rows = list(zip(self._names, self._owners, self._keys, self._values, strict=True))
        known = {(id(owner), key) for _, owner, key, _ in rows}
        added = [
            f"{path}.{key}".lstrip(".")
            for path, owner in self._registries
            for key in owner
            if (id(owner), key) not in known
        ]
        return added + [
            name for name, owner, key, value in rows if owner.get(key) is not value or id(value) in converted
        ]

    def _count(self) -> list[int]:
        return [*map(len, self._dicts)]

    def words(self) -> str:
        """What was changed, in a sentence's beginning."""
        names = self.changes()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        were = "was" if len(names) == 1 else "were"
        return f"{', '.join(names[:3])}{more} of the model {were} replaced, added or converted"

    def _are_laid_out_alike(self) -> bool:
        """Another layout needs other memory, and addresses are compared five times as fast."""
        places = self._find_places()
        if places != self._places:
            if list(map(_layout, self._tensors)) != self._layouts:
                return False
            self._places = places
        return True

    def _find_places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value)


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _registries(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers, owner._modules):
            yield path, registry


class ModelGuards:
    """Watches a model (and a loss that is a module) from when it is made."""

    def __init__(self, *roots: nn.Module) -> None:
        named = [(name, module) for root in roots for name, module in root.named_modules()]
        modules = [module for _, module in named]
        self._named, self._modules = named, modules
        self._sizes = self._count()
        self._numbers: dict[int, _Number] = {}
        self._hooks = [vars(m)[kind] for m in modules for kind in _HOOKS]
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

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on the values of these tensors count as attributes."""
        for name, tensor in tensors.items():
            if id(tensor) not in self._numbers:
                number = self._numbers[id(tensor)] = _Number(tensor)
                self._names.append(self._unlike_others(name))
                self._first = [*self._first, number.value()]
                self._last = [*self._last, number.value()]

    def watch_read(self, read: ReadState, written: Collection[tuple[int, Any]] = ()) -> None:
        """From now on all that the model's code may read counts, but what it changes itself.

        A count of its own calls would count as changed after each call of the model as it is.
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
        """From now on what a container at this place holds counts; what it is now."""
        if not is_container(now):
            return now
        self._snapshot[i] = Snapshot(now)
        found = self._last[i] = self._snapshot[i].value(now)
        self._first[i] = found if self._first[i] is now else frozen(self._first[i])
        return found

    def _forget(self, i: int) -> None:
        self._specs[i] = {}, self._specs[i][1]
        self._places.clear()
        self._first[i] = self._last[i] = ABSENT
        self._snapshot.pop(i, None)
        self._changed.pop(i, None)

    def changed(self) -> Key:
        """The Python attributes that are no longer what they were; other ones need another program."""
        if self._count() != self._sizes:
            self._watch_new()
        values = self._values()
        if not all(map(is_, values, self._last)):
            self._note_changes(values)
        return self._last_key

    def _note_changes(self, values: list[Any]) -> None:
        """Look at those alone that are other objects than at the last call: one may change at each."""
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
        """The type and the value that an attribute had at the beginning."""
        return self._objects.token(self._first[self._names.index(name)])

    def number(self, name: str) -> AttributeNumber | None:
        """An attribute that is a number now; None for what is no attribute of a module, or no number."""
        if len(self._places) != len(self._specs):  # looked up at each call, so by name
            self._places = dict(zip(self._names, self._specs, strict=False))
        owner, key = self._places.get(name, ({}, name))
        if type(owner) is not dict or "__builtins__" in owner:  # the globals of a module are everybody's
            return None
        return AttributeNumber(name, owner, key, owner[key]) if fits(owner.get(key)) else None

    def _count(self) -> list[int]:
        return [len(vars(module)) for _, module in self._named]

    def _watch_new(self) -> None:
        """Watch attributes that modules were given since, of names that the code reads or their classes have.

        Others the forward cannot have read when it was captured.
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
        """Watch one more place; what is noted of hooks and buffers stands after these."""
        self._known[known_by] = at = len(self._specs)
        self._specs.append((owner, key))
        self._names.insert(at, self._unlike_others(name))
        first = before[0] if before else owner.get(key, ABSENT)
        self._first.insert(at, first)
        self._last.insert(at, first)
        self._changed = {i + (i >= at): row for i, row in self._changed.items()}
        return at

    def _unlike_others(self, name: str) -> str:
        """A name that no other place has; keys tell places apart by their names."""
        self._taken[name] = count = self._taken.get(name, 0) + 1
        return name if count == 1 else f"{name} ({count})"

    def _values(self) -> list[Any]:
        own = [attributes.get(name, ABSENT) for attributes, name in self._specs]
        for i, snapshot in self._snapshot.items():
            own[i] = snapshot.value(own[i])
        hooks = self._kept_hooks.value([*chain.from_iterable(self._hooks), *global_hooks()])
        classes = self._kept_classes.value([*map(type, self._modules)])
        return [*own, *map(len, self._hooks), hooks, classes, *(n.value() for n in self._numbers.values())]


class _Kept:
    """An object that stands for a list, the same for equal ones: hooks have other numbers on other ranks."""

    def __init__(self) -> None:
        self._now: list[Any] = []
        self._known: dict[tuple[Any, ...], object] = {}
        self._value = self._known[()] = object()

    def value(self, now: list[Any]) -> object:
        """What stands for it."""
        if now != self._now:
            self._now, self._value = now, self._known.setdefault(tuple(now), object())
        return self._value


class _Number:
    """A buffer, read again after it was written; on CPU always, as writes into `.data` leave no trace."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._version, self._value = buffer._version, (buffer.tolist(),)

    def value(self) -> tuple[Any, ...]:
        """The contents: the same object as long as they are the same."""
        if self._buffer._version != self._version or self._buffer.device.type == "cpu":
            self._version, now = self._buffer._version, (self._buffer.tolist(),)
            if now != self._value:
                self._value = now
        return self._value
