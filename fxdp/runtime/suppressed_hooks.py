"""Hooks on a parameter that gets no gradient stay quiet, as on one device, whose backward does not reach it.

The backward of a program has an edge to each parameter, and along those that bring nothing torch calls hooks
with None. A hook that multiplies, clips or counts gradients would fail, or count twice what had accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def suppress(parameter: Tensor) -> None:
    """From now on the hooks that a parameter has are called where it got a gradient, and only there."""
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
    """Knows what came last."""

    gradient: bool = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.gradient = gradient is not None


@dataclass(frozen=True)
class _SuppressedHook:
    """One hook."""

    hook: Callable[..., Any]
    came: _Came | None = None
    """Of a hook that is given the parameter, after its gradient was added."""

    def __call__(self, value: Tensor | None) -> Any:
        here = value is not None if self.came is None else self.came.gradient
        return self.hook(value) if here else None
