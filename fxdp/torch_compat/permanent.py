"""Changes of torch or Python that every thread sees, most of which last until the process ends.

    replace_for_good("sys:excepthook", make)      sys.excepthook = make(sys.excepthook)

All other changes go through `patch.py`, for one thread and a limited time. `docs/process.md` has a row for
each of these: why one thread is not enough, the effect on other code, and what restores the former state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["replace_for_good", "replace_in_modules"]


def replace_for_good(name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute, named as `module:path`, by `make(current value)`."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, attribute, make(getattr(owner, attribute)))


def replace_in_modules(bound: Mapping[str, Sequence[dict[str, Any]]], value: Any) -> None:
    """Replace a function of `torch.distributed` in the modules that bind it, given by name."""
    for name, owners in bound.items():
        for owner in owners:
            owner[name] = value
