"""Of what torch puts around modules: how its wrappers are known by what they do to the module inside."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["READ_BY_WRAPPERS", "running_ddp"]

READ_BY_WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    # asked of every module that Dynamo wraps or meets, whether it is a lazy one
    "_initialize_hook": "torch.compile",
}
"""Attributes that a wrapper's constructor asks a module for, and nobody else does."""


def running_ddp() -> nn.Module | None:
    """The `DistributedDataParallel` inside of whose forward this is called."""
    return DistributedDataParallel._active_ddp_module
