"""Notice that a model no longer holds the tensors its programs were bound to, or holds others in them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Layout: TypeAlias = "tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]"


class Held:
    """The parameters, buffers and modules of a model, as they were.

    Values that change in place are none of its business: programs read them from the same tensors. But
    `model.bfloat16()` or `model.to(memory_format=...)` leaves the tensors and changes what is in them.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [(f"{path}.{key}".lstrip("."), held, key) for path, held, key in _registered(module)]
        self._names = [name for name, _, _ in found]
        self._held = [held for _, held, _ in found]
        self._keys = [key for _, _, key in found]
        self._values = [held[key] for _, held, key in found]
        self._tensors = [value for value in self._values if _has_memory(value)]
        self._layouts = list(map(_layout, self._tensors))
        self._places = self._find_places()

    def unchanged(self) -> bool:
        """Whether all are the same objects, of the same types and strides; called at each step."""
        try:
            same = all(map(is_, map(getitem, self._held, self._keys), self._values))
        except KeyError:
            return False
        return same and self._are_laid_out_alike()

    def changes(self) -> list[str]:
        """The names of those that were replaced, converted or deleted."""
        converted = {
            id(tensor)
            for tensor, layout in zip(self._tensors, self._layouts, strict=True)
            if _layout(tensor) != layout
        }
        rows = zip(self._names, self._held, self._keys, self._values, strict=True)
        return [
            name for name, held, key, value in rows if held.get(key) is not value or id(value) in converted
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
        for held in (owner._parameters, owner._buffers, owner._modules):
            for key in held:
                yield path, held, key
