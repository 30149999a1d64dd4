"""What no trainer can be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fxdp


def check_replicated(options: Mapping[str, Any]) -> None:
    """Refuse options by which parameters become others than those that an optimizer has already.

    Raises
    ------
    InputError : `strategy="shard"`.
    """
    strategy = options.get("strategy", "replicate")
    if strategy != "replicate":
        raise fxdp.InputError(
            f"strategy={strategy!r} makes other parameters of the model's, and a trainer made its optimizer "
            'before; expected strategy="replicate". Accelerate and Fabric take a model that you compiled '
            "yourself, and the optimizer that you made of its parameters afterwards"
        )
