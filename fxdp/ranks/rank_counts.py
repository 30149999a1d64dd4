"""Modules that keep the number of ranks, as code for `DistributedDataParallel` does to undo its averages.

    self.world_size = dist.get_world_size()      in __init__, outside of what sees one device: 2
    return loss * self.world_size                in forward: twice one device's loss

One device has the number 1. Which attribute counts ranks, only its name tells, so this is a warning.
"""

from __future__ import annotations

import logging
import re

from torch import nn

_log = logging.getLogger("fxdp")
_RANK_COUNT = re.compile(r"_?(world(_size)?|(num|n)_?(replicas|ranks|gpus?|devices)|(dp|data_parallel)_size)")


def warn_of_rank_counts(model: nn.Module, ranks: int, name: str = "the model") -> None:
    """Log a warning if a model's modules keep the number of ranks in attributes, with their paths."""
    kept = [
        f"{path}.{attribute}".lstrip(".")
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) is int and value == ranks > 1 and _RANK_COUNT.fullmatch(attribute)
    ]
    if kept:
        _log.warning(
            "%s of %s is %d, as the number of ranks is. The code sees the global batch on one device, so a "
            "loss that is multiplied by this number is %d times one device's: set it to 1",
            ", ".join(kept), name, ranks, ranks,
        )  # fmt: skip
