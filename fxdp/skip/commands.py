"""The commands that the forward of a skippable module yields."""

from __future__ import annotations

from torch import Tensor


class stash:  # noqa: N801 - reads as a command
    """`yield stash(name, tensor)` stores a tensor, or None, under a declared name."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"stash({self.name!r}, ...)"


class pop:  # noqa: N801 - reads as a command
    """`tensor = yield pop(name)` returns the tensor that an earlier module stashed under a declared name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"pop({self.name!r})"
