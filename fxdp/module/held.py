"""Notice that a model no longer holds the tensors its programs were bound to, or holds others in them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxdp.ir.model_tensors import held

Layout: TypeAlias = "tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]"


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
        self._shards = [(v, t) for v, t in zip(self._kept, self._tensors, strict=True) if v is not t]
        self._layouts = list(map(_layout, self._tensors))
        self._places = self._find_places()

    def unchanged(self) -> bool:
        """Whether all are the same objects, of the same types and strides; called at each step."""
        try:
            same = all(map(is_, map(getitem, self._owners, self._keys), self._values))
        except KeyError:
            return False
        return same and all(held(v) is t for v, t in self._shards) and self._are_laid_out_alike()

    def changes(self) -> list[str]:
        """The names of those that were replaced, converted or deleted."""
        before = zip(self._kept, self._tensors, self._layouts, strict=True)
        converted = {id(v) for v, t, layout in before if held(v) is not t or _layout(t) != layout}
        rows = zip(self._names, self._owners, self._keys, self._values, strict=True)
        return [
            name for name, owner, key, value in rows if owner.get(key) is not value or id(value) in converted
        ]

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


def _layout(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _registered(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers, owner._modules):
            for key in registry:
                yield path, registry, key
