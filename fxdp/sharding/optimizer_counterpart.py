"""An optimizer's counterpart, on which a step works instead of the optimizer, and the sharding of states.

    optimizer     param_groups  w: DTensor   state of w: step, exp_avg: DTensor   seen by users, checkpoints
    counterpart   param_groups  w: Tensor    state of w: step, exp_avg: Tensor    used by step()

The counterpart has the same class and options, and lives for one step. So a step that raises leaves the
optimizer unchanged, and nothing needs to be restored.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxdp.ir.graph.model_tensors import local_of, sharding_of
from fxdp.ir.ops.parameter_shards import shard_range
from fxdp.torch_compat import shard_axes, sharded_tensor


def counterpart_of(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer of the same class (one of `torch.optim`), without parameters and state."""
    make: Any = type(optimizer)
    twin: Optimizer = make([torch.empty(0, 0)])  # of two dims, as Muon requires
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    vars(twin).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
    return twin


def keep_options(optimizer: Optimizer, twin: Optimizer) -> None:
    """Copy the options that the counterpart's step has written into its groups to the optimizer."""
    for group, stepped in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update({name: value for name, value in stepped.items() if name != "params"})


def rows_of(parameter: DTensor, value: Tensor) -> Tensor:
    """Return this rank's shard of a value that belongs to a parameter, full or sharded."""
    if not isinstance(value, DTensor):
        first, last = shard_range(len(value), sharding_of(parameter))
        return value[first:last].clone()
    if value.placements != parameter.placements:
        value = value.redistribute(parameter.device_mesh, parameter.placements)
    return local_of(value)


def as_dtensor(parameter: DTensor, local: Tensor, rows: int) -> DTensor:
    """Return a `DTensor` with a parameter's placement of which this rank holds `local`."""
    full = torch.empty((rows, *local.shape[1:]), dtype=local.dtype, device="meta")
    made = sharded_tensor(local, full, parameter.device_mesh, shard_axes(parameter)).detach()
    assert isinstance(made, DTensor)
    return made
