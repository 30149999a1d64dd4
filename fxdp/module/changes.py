"""What a user changes of a model between two calls: tensors (`Held`), attributes and hooks (`ModelState`).

Eager code sees at once what the user changes between two calls (`model.beta = 0.5`, a hook). A program does
not, so each call asks here, by comparing the identities of a few hundred objects. Buffers whose values a
program was made for (`capture/patches/module_state.py`) are watched like attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxdp.capture.python_values import AttributeNumber
from fxdp.capture.refusals.stateful import own_attributes
from fxdp.ir.model_tensors import all_held, held
from fxdp.module.values import fits

Key: TypeAlias = "tuple[tuple[str, tuple[str, Any]], ...]"
"""The attributes that differ from those of the beginning: name, type and value."""

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))

_CONTAINERS = (list, tuple, dict)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SPOKEN = [kind.replace("_", " ") for kind in _HOOKS]

_Layout: TypeAlias = "tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]"


class Held:
    """The parameters, buffers and modules of a model, as they were.

    Values that change in place are none of its business: programs read them from the same tensors. But
    `model.bfloat16()` or `model.to(memory_format=...)` leaves the tensors and changes what is in them.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [(f"{path}.{key}".lstrip("."), owner, key) for path, owner, key in _registered(module)]
        self._names = [name for name, _, _ in found]
        self._owners = [owner for _, owner, _ in found]
        self._keys = [key for _, _, key in found]
        self._values = [owner[key] for _, owner, key in found]
        self._kept = [value for value in self._values if _has_memory(value)]
        self._tensors = list(map(held, self._kept))
        # a DTensor can stay the same object and get another shard; a plain tensor is its own memory
        shards = [(v, t) for v, t in zip(self._kept, self._tensors, strict=True) if v is not t]
        self._sharded, self._shards = [v for v, _ in shards], [t for _, t in shards]
        self._layouts = list(map(_layout, self._tensors))
        self._places = self._find_places()

    def unchanged(self) -> bool:
        """Whether all are the same objects, of the same types and strides; called at each step."""
        try:
            same = all(map(is_, map(getitem, self._owners, self._keys), self._values))
        except KeyError:
            return False
        return same and all(map(is_, all_held(self._sharded), self._shards)) and self._are_laid_out_alike()

    def changes(self) -> list[str]:
        """The names of those that were replaced, converted or deleted."""
        before = zip(self._kept, self._tensors, self._layouts, strict=True)
        converted = {id(v) for v, t, layout in before if held(v) is not t or _layout(t) != layout}
        rows = zip(self._names, self._owners, self._keys, self._values, strict=True)
        return [
            name for name, owner, key, value in rows if owner.get(key) is not value or id(value) in converted
        ]

    def words(self) -> str:
        """What was changed, in a sentence's beginning."""
        names = self.changes()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        were = "was" if len(names) == 1 else "were"
        return f"{', '.join(names[:3])}{more} of the model {were} replaced or converted"

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


def _registered(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers, owner._modules):
            for key in registry:
                yield path, registry, key


class ModelState:
    """Watches a model (and a loss that is a module) from when it is made."""

    def __init__(self, *roots: nn.Module) -> None:
        named = [(name, module) for root in roots for name, module in root.named_modules()]
        modules = [module for _, module in named]
        self._root = roots[0]
        self._named = named
        self._sizes = self._count()
        self._numbers: dict[str, _Number] = {}
        self._hooks = [vars(m)[kind] for m in modules for kind in _HOOKS]
        self._slots = [(vars(m), name) for m in modules for name in own_attributes(m)]
        self._names = [f"{name} of {path or 'the model'}" for path, m in named for name in own_attributes(m)]
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._names += [f"number of{kind} of {path or 'the model'}" for path, _ in named for kind in _SPOKEN]
        self._first = self._values()
        self._last = list(self._first)
        self._last_key: Key = ()
        self._changed: dict[int, tuple[str, tuple[str, Any]]] = {}
        self._objects: list[Any] = []

    def watch(self, names: Iterable[str]) -> None:
        """From now on the values of these buffers of the first root count as attributes."""
        for name in names:
            if name not in self._numbers:
                number = self._numbers[name] = _Number(self._root.get_buffer(name))
                self._names.append(f"value of buffer {name}")
                self._first = [*self._first, number.value()]
                self._last = [*self._last, number.value()]

    def changed(self) -> Key:
        """The Python attributes that are no longer what they were; other ones need another program."""
        if self._count() != self._sizes:
            self._watch_shadows()
        values = self._values()
        if not all(map(is_, values, self._last)):
            self._note_changes(values)
        return self._last_key

    def _note_changes(self, values: list[Any]) -> None:
        """Look at those alone that are other objects than at the last call: one may change at each."""
        for i, (now, last) in enumerate(zip(values, self._last, strict=True)):
            if now is not last:
                self._changed.pop(i, None)
                if not _equal(now, self._first[i]):
                    self._changed[i] = self._names[i], self._token(now)
        self._last = values
        self._last_key = tuple(self._changed[i] for i in sorted(self._changed))

    def first(self, name: str) -> tuple[str, Any]:
        """The type and the value that an attribute had at the beginning."""
        return self._token(self._first[self._names.index(name)])

    def number(self, name: str) -> AttributeNumber | None:
        """An attribute that is a number now; None for what is no attribute, or no number."""
        if len(self._places) != len(self._slots):  # looked up at each call, so by name
            self._places = dict(zip(self._names, self._slots, strict=False))
        owner, key = self._places.get(name, ({}, name))
        return AttributeNumber(name, owner, key, owner[key]) if fits(owner.get(key)) else None

    def _count(self) -> list[int]:
        return [len(vars(module)) for _, module in self._named]

    def _watch_shadows(self) -> None:
        """Watch attributes that modules were given since, in the place of those of their classes.

        Others the forward cannot have read when it was captured.
        """
        self._sizes = self._count()
        known = {(id(attributes), name) for attributes, name in self._slots}
        for path, module in self._named:
            for name in own_attributes(module):
                if (id(vars(module)), name) not in known and hasattr(type(module), name):
                    at = len(self._slots)
                    self._slots.append((vars(module), name))
                    self._names.insert(at, f"{name} of {path or 'the model'}")
                    self._first.insert(at, getattr(type(module), name))
                    self._last.insert(at, self._first[at])
                    # what is noted of hooks and buffers stands after the attributes
                    self._changed = {i + (i >= at): row for i, row in self._changed.items()}

    def _values(self) -> list[Any]:
        own = [attributes.get(name) for attributes, name in self._slots]
        return [*own, *map(len, self._hooks), *(number.value() for number in self._numbers.values())]

    def _token(self, value: Any) -> tuple[str, Any]:
        """A type, and a value that is equal on all ranks: itself, or the number of an object."""
        if isinstance(value, _PLAIN):
            return type(value).__name__, value
        if type(value) in _CONTAINERS:
            return type(value).__name__, tuple(map(self._token, _items(value)))
        index = next((i for i, known in enumerate(self._objects) if known is value), len(self._objects))
        if index == len(self._objects):
            self._objects.append(value)
        return type(value).__name__, f"object {index}"


class _Number:
    """A buffer, read again only after it was written."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._version, self._value = buffer._version, (buffer.tolist(),)

    def value(self) -> tuple[Any, ...]:
        """The contents: the same object as long as they are the same."""
        if self._buffer._version != self._version:
            self._version, now = self._buffer._version, (self._buffer.tolist(),)
            if now != self._value:
                self._value = now
        return self._value


def _equal(a: Any, b: Any) -> bool:
    """Whether eager code would see the same; torch's export puts copies in the place of containers."""
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) in _CONTAINERS:
        return len(a) == len(b) and all(map(_equal, _items(a), _items(b)))
    return isinstance(a, _PLAIN) and bool(a == b)


def _items(container: Any) -> list[Any]:
    return [x for pair in container.items() for x in pair] if isinstance(container, dict) else list(container)
