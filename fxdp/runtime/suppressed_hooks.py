"""Suppress hooks on a parameter without a gradient, as on one device, where the backward skips it.

The backward of a program has an edge to each parameter, and torch calls hooks with None along an edge without
a gradient. A hook that multiplies, clips or counts gradients would fail, or count an accumulated gradient
twice.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def suppress(parameter: Tensor) -> None:
    """Call the present hooks of a parameter only when the parameter gets a gradient, from now on."""
    hooks: Any = parameter._backward_hooks
    after: MutableMapping[int, Callable[..., Any]] | None = parameter._post_accumulate_grad_hooks
    if after and not all(isinstance(hook, _SuppressedHook) for hook in after.values()):
        came = _Came()
        parameter.register_hook(came)  # type: ignore[no-untyped-call]
        hooks = parameter._backward_hooks
        for key, hook in after.items():
            after[key] = hook if isinstance(hook, _SuppressedHook) else _SuppressedHook(hook, came)
    for key, hook in (hooks or {}).items():
        hooks[key] = hook if isinstance(hook, (_SuppressedHook, _Came)) else _SuppressedHook(hook)


@dataclass
class _Came:
    """Hook that records whether the last value was a gradient."""

    gradient: bool = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.gradient = gradient is not None


@dataclass(frozen=True)
class _SuppressedHook:
    """A hook that is skipped without a gradient."""

    hook: Callable[..., Any]
    came: _Came | None = None
    """The record for a hook that takes the parameter, called after the gradient was accumulated."""

    def __call__(self, value: Tensor | None) -> Any:
        here = value is not None if self.came is None else self.came.gradient
        return self.hook(value) if here else None
