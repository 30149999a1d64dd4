"""The attributes of torch that fxdp replaces, in a capture and by its shortcuts."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from fxdp.capture.patches import patch_tables
from fxdp.torch_compat.shortcut_table import SHORTCUTS


@functools.cache
def replaced() -> frozenset[str]:
    """Dotted: `torch.nn.functional.ctc_loss`. What one capture replaces is what every capture does.

    What is replaced around Inductor stands in the sources (`mock.patch.object(owner, "name", ...)`).
    """
    return frozenset({*_of_a_capture(), *(name.path for one in SHORTCUTS for name in one.names)})


def _of_a_capture() -> set[str]:
    guards: Any = sys.modules[patch_tables.Patch.__module__]
    found: set[str] = set()
    install = guards._installed

    def recorded(patch: Any, here: Any) -> Any:
        # several modules at once are those that took a function of Python's own
        if isinstance(patch.owner, (type, ModuleType)):
            module = patch.owner.__module__ + "." if isinstance(patch.owner, type) else ""
            found.add(f"{module}{getattr(patch.owner, '__qualname__', patch.owner.__name__)}.{patch.name}")
        return install(patch, here)

    module = nn.Linear(2, 2)
    with (
        mock.patch.object(guards, "_installed", recorded),
        patch_tables.capture_patches(module, None),
        patch_tables.recording_effects(module, (torch.zeros(2, 2),)),
    ):
        pass
    return {path for path in found if path.partition(".")[0] == "torch"}
