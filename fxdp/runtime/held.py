"""Notice that a model no longer holds the tensors its programs were bound to."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem, is_
from typing import Any

from torch import nn


class Held:
    """The parameters, buffers and modules of a model, as they were.

    Values that change in place are none of its business: programs read them from the same tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [(f"{path}.{key}".lstrip("."), held, key) for path, held, key in _registered(module)]
        self._names = [name for name, _, _ in found]
        self._held = [held for _, held, _ in found]
        self._keys = [key for _, _, key in found]
        self._values = [held[key] for _, held, key in found]

    def unchanged(self) -> bool:
        """Whether all are the same objects; called at each step."""
        try:
            return all(map(is_, map(getitem, self._held, self._keys), self._values))
        except KeyError:
            return False

    def changes(self) -> list[str]:
        """The names of those that were replaced or deleted."""
        rows = zip(self._names, self._held, self._keys, self._values, strict=True)
        return [name for name, held, key, value in rows if held.get(key) is not value]


def _registered(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, owner in module.named_modules():
        for held in (owner._parameters, owner._buffers, owner._modules):
            for key in held:
                yield path, held, key
