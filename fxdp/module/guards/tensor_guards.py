"""`TensorGuards`: parameters, buffers and modules of a model stay the same objects, with the same strides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from operator import eq
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxdp.capture.snapshot import ABSENT
from fxdp.ir.graph.model_tensors import all_local, local_of
from fxdp.module.function_module import FunctionModule
from fxdp.module.guards.comparison import Comparison, Reading, all_hold

_Layout: TypeAlias = "tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]"


class TensorGuards:
    """Guards on the parameters, buffers and modules of a model, and of a loss that is a module.

    Values may change in place: programs read them from the same tensors. But `model.bfloat16()` or
    `model.to(memory_format=...)` keeps the tensor objects and changes their dtype or strides.
    """

    def __init__(self, *roots: Any) -> None:
        registries = [row for root in roots if isinstance(root, nn.Module) for row in _registries(root)]
        found = [(f"{path}.{key}".lstrip("."), owner, key) for path, owner in registries for key in owner]
        self._registries = registries
        self._names = [name for name, _, _ in found]
        self._owners = [owner for _, owner, _ in found]
        self._keys = [key for _, _, key in found]
        self._values = [owner[key] for _, owner, key in found]
        self._kept = [value for value in self._values if _has_memory(value)]
        self._tensors = list(map(local_of, self._kept))
        self._layouts = list(map(_layout, self._tensors))
        self._functions = [root for root in roots if isinstance(root, FunctionModule)]
        self._objects = [read.now() for read in self._reads()]
        # a different layout needs different memory, and addresses are compared five times as fast
        self._addresses = Reading(partial(map, Tensor.data_ptr, self._tensors), eq)
        self._comparisons: tuple[Comparison, ...] | None = (
            None  # from the first check on: fakes have no address
        )

    def _reads(self) -> Iterator[Reading]:
        yield Reading(partial(map, len, [owner for _, owner in self._registries]), eq)
        yield Reading(partial(map, dict.get, self._owners, self._keys, repeat(ABSENT)))
        for function in self._functions:
            yield Reading(function.ids_now, eq)
        # a DTensor can stay the same object and get a different shard; a plain tensor is its own memory
        pairs = zip(self._kept, self._tensors, strict=True)
        if sharded := [value for value, tensor in pairs if value is not tensor]:
            yield Reading(partial(all_local, sharded))

    def unchanged(self) -> bool:
        """Return whether all are the same objects, of the same types and strides; called at each step."""
        if self._comparisons is not None and all_hold(self._comparisons):
            return True
        if not all_hold(self._objects) or list(map(_layout, self._tensors)) != self._layouts:
            return False
        self._comparisons = *self._objects, self._addresses.now()  # the same layout in new memory
        return True

    def changes(self) -> list[str]:
        """Return the names of tensors and modules that were added, replaced, converted or deleted."""
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

    def words(self) -> str:
        """Return the beginning of a sentence that names the changes."""
        names = self.changes()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        were = "was" if len(names) == 1 else "were"
        return f"{', '.join(names[:3])}{more} of the model {were} replaced, added or converted"


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value)


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _registries(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers, owner._modules):
            yield path, registry
