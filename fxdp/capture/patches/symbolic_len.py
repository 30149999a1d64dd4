"""`len(tensor)` in the user's code, which must be an int and so would fix the batch size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fxdp.capture.patches.patch import Patch

_LIBRARIES = frozenset({"builtins", "fxdp", "numpy", "sympy", "torch", "mpmath", "networkx"})
"""Their code needs real ints, and is no part of a model."""


def symbolic_len(module: nn.Module, loss_fn: Callable[..., Any] | None) -> tuple[Patch, ...]:
    """Shadow the builtin in all modules that may hold code of the model.

    In `builtins` itself all code would pay for it, Python's own and torch's tracing most of all.
    """
    wanted = [names for names in _user_globals(module, loss_fn) if "len" not in names]
    return tuple(Patch(names, "len", _sizing) for names in wanted)


def _sizing(plain: Callable[[Any], int]) -> Callable[[Any], Any]:
    def length(value: Any) -> Any:
        """A tensor's size as what it is, symbolic while it is traced."""
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
        return plain(value)

    return length


def _user_globals(module: nn.Module, loss_fn: Callable[..., Any] | None) -> list[dict[str, Any]]:
    """The global names of all loaded modules that may hold code of the model."""
    found: dict[int, dict[str, Any]] = {}
    for name, loaded in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root not in _LIBRARIES and root not in sys.stdlib_module_names:
            names = getattr(loaded, "__dict__", {})
            found[id(names)] = names
    # a class that was made by `exec`, or in a notebook, is in no loaded module
    functions = [loss_fn, *(type(child).forward for child in module.modules())]
    for function in functions:
        names = getattr(function, "__globals__", {})
        if str(names.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            found[id(names)] = names
    return [names for names in found.values() if names.get("__name__") and isinstance(names, dict)]
