"""Checks of options that no trainer supports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fxdp


def check_replicated(options: Mapping[str, Any]) -> None:
    """Raise for options that replace parameters for which an optimizer already exists.

    Raises
    ------
    InputError : `strategy` is not `"replicate"`.
    """
    strategy = options.get("strategy", "replicate")
    if strategy != "replicate":
        raise fxdp.InputError(
            f"strategy={strategy!r} makes other parameters of the model's, and a trainer made its optimizer "
            'before; expected strategy="replicate". Accelerate and Fabric take a model that you compiled '
            "yourself, and the optimizer that you made of its parameters afterwards"
        )
