"""A batch as entries, each with its `Rows`, whatever containers and objects it is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import LEFT_OUT, RowsPerSample
from fxdp.capture.input_axes import SAMPLES
from fxdp.capture.ragged_rows import Rows, has_rows
from fxdp.eager.ragged.kinds import fields_in_place, fields_of, is_recognised, rows_by_key, rows_of_lists
from fxdp.eager.ragged.kinds.object_fields import Largest
from fxdp.eager.ragged.lists import is_plain_list
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import InputError

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""Classes of values that hold no tensors."""
Make = Callable[[Mapping[str, Any]], Any]
"""Returns a part of the batch with the values of its entries by path."""


@dataclass
class Entry:
    """One value of a batch.

    Attributes
    ----------
    path : where it is, as `['graph'].edge_index`.
    value : a tensor, an integer or a list; None: this rank has none.
    rows : what it holds; None: no batch, it stays as it is, or only other ranks know.
    parent, key : the path of the mapping that holds it, and its key there; empty for others.
    """

    path: str
    value: Any
    rows: Rows | Largest | None
    parent: str = ""
    key: str = ""

    @property
    def is_vacant(self) -> bool:
        """Whether this rank says nothing about the value, which others may have."""
        return self.value is None or (isinstance(self.value, (list, tuple)) and not self.value)


class Opened:
    """A batch as entries by path; `make` puts values in their places.

    With `in_place` it is a batch of one device: its tensors are changed, and objects keep all else.
    """

    def __init__(self, tree: Any, batch_dims: Any, *, in_place: bool = False) -> None:
        self._in_place = in_place
        self.entries: dict[str, Entry] = {}
        self.added: dict[str, list[Entry]] = {}
        """Entries that only other ranks have, by the path of their mapping."""
        self.lists: dict[str, Any] = {}
        """Lists without tensors, as captions, by path: whether an element is a sample's, all ranks tell."""
        self.unknown: list[str] = []
        """Paths that `batch_dims` names and this rank has not."""
        self.is_ragged = has_rows(batch_dims)
        self._make = self._open(tree, "", LEFT_OUT if batch_dims is None else batch_dims)
        entries = self.entries.values()
        if any(isinstance(entry.value, GlobalTensor) for entry in entries):
            for entry in entries:  # the batch has entered before: its numbers are global, too
                entry.rows = entry.rows if isinstance(entry.value, Tensor) else None

    def make(self, values: Mapping[str, Any]) -> Any:
        """Return the batch with these values, by path; entries that are not named keep theirs."""
        return self._make({**{path: entry.value for path, entry in self.entries.items()}, **values})

    def add(self, entry: Entry) -> None:
        """Add an entry to its mapping, or a value to an entry that has none."""
        if entry.path not in self.entries:
            self.added.setdefault(entry.parent, []).append(entry)
        self.entries[entry.path] = entry

    def _open(self, value: Any, path: str, prefix: Any, default: Any = None) -> Make:
        given = default if prefix is LEFT_OUT else prefix
        is_told = prefix is None or isinstance(given, (Rows, Largest))
        if type(value) in _PLAIN and not isinstance(given, (Rows, Largest)):
            return self._entry(value, path, None)
        if not is_told and not isinstance(value, Tensor) and is_recognised(value) and is_global(value):
            return self._entry(value, path, None)
        found = None if is_told else (fields_in_place if self._in_place else fields_of)(value)
        if found is None and self._in_place and is_recognised(value):
            return self._entry(value, path, None)
        if found is not None:
            self.is_ragged = True
            if prefix is not LEFT_OUT and not isinstance(prefix, int):
                raise InputError(
                    f"batch_dims{path} is {prefix!r}, but {type(value).__name__} says itself what its values "
                    "are; expected nothing there, or None for no batch"
                )
            makes = [
                self._entry(one, f"{path}.{name}", within(rows, path)) for name, one, rows in found.values
            ]
            return lambda values: found.make([make(values) for make in makes])
        if isinstance(value, Tensor) or _is_one_value(value, given):
            return self._entry(value, path, _rows(value, path, prefix, default))
        if isinstance(value, Mapping):
            return self._open_mapping(value, path, prefix)
        if path and prefix is LEFT_OUT and is_plain_list(value):
            self.lists[path] = value
            return self._entry(value, path, None)
        if isinstance(value, (list, tuple)) and value:
            return self._open_sequence(value, path, prefix)
        leaves, spec = pytree.tree_flatten(value)
        if (len(leaves) == 1 and leaves[0] is value) or not leaves:
            if not self._in_place and _has_tensors(value):
                return self._open_object(value, path, prefix)
            return self._entry(value, path, None)
        makes = [self._open(leaf, f"{path}[{i}]", prefix) for i, leaf in enumerate(leaves)]
        return lambda values: pytree.tree_unflatten([make(values) for make in makes], spec)

    def _open_mapping(self, mapping: Mapping[Any, Any], path: str, prefix: Any) -> Make:
        self.is_ragged |= not isinstance(mapping, dict)  # torch's pytree takes it for a leaf
        parts = _parts(prefix, mapping, path)
        known = rows_by_key(mapping) if prefix is not None else {}
        lists = rows_of_lists(mapping) if prefix is not None else {}
        self.is_ragged |= bool(known or lists)
        makes = {}
        for key, value in mapping.items():
            of_key = known.get(key) or lists.get(key) if parts[key] is LEFT_OUT else None
            below = f"{path}[{key!r}]"
            makes[key] = self._open(value, below, parts[key], within(of_key, path))
            if below in self.entries and isinstance(key, str):
                self.entries[below].parent, self.entries[below].key = path, key
        if isinstance(prefix, Mapping):
            self.unknown += [f"{path}[{key!r}]" for key in prefix if key not in mapping]

        def make(values: Mapping[str, Any]) -> Any:
            made = {key: one(values) for key, one in makes.items()}
            made |= {entry.key: values[entry.path] for entry in self.added.get(path, ())}
            if type(mapping) is dict:
                return made
            copied: Any = copy.copy(mapping)
            for key, value in made.items():
                copied[key] = value
            return copied

        return make

    def _open_sequence(self, items: Sequence[Any], path: str, prefix: Any) -> Make:
        lists = rows_of_lists(dict(enumerate(items))) if prefix is LEFT_OUT else {}
        self.is_ragged |= bool(lists)
        parts = _parts(prefix, items, path)
        makes = [
            self._open(item, f"{path}[{i}]", parts[i], within(lists.get(i), path))
            for i, item in enumerate(items)
        ]
        kind: Any = type(items)

        def make(values: Mapping[str, Any]) -> Any:
            made = [one(values) for one in makes]
            return kind(*made) if hasattr(items, "_fields") else kind(made)

        return make

    def _open_object(self, value: Any, path: str, prefix: Any) -> Make:
        self.is_ragged = True  # torch's pytree takes it for a leaf
        makes = {
            name: self._open(one, f"{path}.{name}", prefix)
            for name, one in vars(value).items()
            if isinstance(one, (Tensor, Mapping, list, tuple))
        }

        def make(values: Mapping[str, Any]) -> Any:
            made = copy.copy(value)
            for name, one in makes.items():
                object.__setattr__(made, name, one(values))  # also of a frozen dataclass
            return made

        return make

    def _entry(self, value: Any, path: str, rows: Rows | Largest | None) -> Make:
        made = Entry(path, value, rows)
        if made.is_vacant or isinstance(value, GlobalTensor):
            made.rows = None
        self.entries[path] = made
        return lambda values: values[path]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, of objects that are recognised, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for one in value.values() for tensor in tensors_in(one))
    elif isinstance(value, (list, tuple)):
        yield from (tensor for one in value for tensor in tensors_in(one))
    elif (found := fields_of(value)) is not None:
        yield from (one for _, one, _ in found.values if isinstance(one, Tensor))
    else:
        leaves = [*vars(value).values()] if _has_tensors(value) else pytree.tree_leaves(value)
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def is_global(value: Any) -> bool:
    """Return whether a value, or an object or container, has global tensors: it has entered before."""
    if isinstance(value, Tensor):
        return isinstance(value, GlobalTensor)
    if isinstance(value, Mapping):
        return any(map(is_global, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_global, value))
    if is_recognised(value):
        return any(map(is_global, value.stores))
    return _has_tensors(value) and any(map(is_global, vars(value).values()))


def _has_tensors(value: Any) -> bool:
    """Return whether an object of a class that nobody knows has tensors among its attributes."""
    if isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(one, Tensor) for one in vars(value).values())


def _is_one_value(value: Any, rows: Any) -> bool:
    """Return whether a description is of this very value, and not of all tensors in it."""
    if isinstance(value, (list, tuple)):
        return isinstance(rows, Rows) and rows.dim is None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(rows, (Rows, Largest)) and (value is None or is_number)


def _rows(value: Any, path: str, prefix: Any, default: Any) -> Any:
    """Return what a value holds by its part of the prefix, or by what is known of its kind."""
    if isinstance(prefix, Rows):
        return prefix
    if prefix is None or (default is None and value.dim() == 0):
        return None
    if prefix is LEFT_OUT:
        return default or Rows(SAMPLES)
    if isinstance(prefix, int):
        return Rows(SAMPLES, prefix)
    raise InputError(
        f"batch_dims{path} is {prefix!r}; expected an int, fxdp.Rows(...) or None in a ragged batch"
        + (", which has no samples of several rows" if isinstance(prefix, RowsPerSample) else "")
    )


def within(rows: Any, path: str) -> Any:
    """Return the description with the axes of one recognised structure, apart from those of others."""
    if not isinstance(rows, Rows) or not path:
        return rows

    def named(name: Any) -> Any:
        if isinstance(name, tuple):
            return tuple(map(named, name))
        return name if name in (None, SAMPLES) else f"{name} of {path}"

    return replace(
        rows, axis=named(rows.axis), into=named(rows.into), starts=named(rows.starts),
        bounds=named(rows.bounds), lengths=named(rows.lengths),
    )  # fmt: skip


def _parts(prefix: Any, value: Any, path: str) -> dict[Any, Any]:
    """Return the part of a prefix for each key or index of a container."""
    keys = value.keys() if isinstance(value, Mapping) else range(len(value))
    if isinstance(prefix, Mapping) and isinstance(value, Mapping):
        return {key: prefix.get(key, LEFT_OUT) for key in keys}
    if isinstance(prefix, (list, tuple)) and not isinstance(value, Mapping) and len(prefix) == len(value):
        return dict(enumerate(prefix))
    if isinstance(prefix, (Mapping, list, tuple)):
        raise InputError(
            f"batch_dims{path} is {prefix!r}, which is no prefix of the inputs there "
            f"({type(value).__name__} of {len(value)})"
        )
    return dict.fromkeys(keys, prefix)
