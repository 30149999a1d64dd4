"""Replacements for BatchNorm's forward: cumulative averages in tensors, SyncBatchNorm as plain BatchNorm.

With `momentum=None` BatchNorm reads its counter into Python. SyncBatchNorm would communicate while the model
is traced; capture traces the global batch, for which plain BatchNorm computes the same statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fxdp.torch_compat import Patch, around


def _forward(plain: Callable[..., Tensor], self: _BatchNorm, input: Tensor) -> Tensor:
    cumulative = self.momentum is None and self.training and self.track_running_stats
    if cumulative and self.running_mean is not None and self.running_var is not None:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return _averaged(self, input)
    return plain(self, input)


def _averaged(self: _BatchNorm, input: Tensor) -> Tensor:
    """Run BatchNorm with running statistics that are the plain average over all batches so far."""
    assert self.running_mean is not None
    assert self.running_var is not None
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    if self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        factor = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(running * (1 - factor).to(running.dtype) + new * factor.to(running.dtype))
    return result


def _as_plain(_: Any) -> Callable[..., Tensor]:
    # The function itself, not a call by name: a caller that patches both classes on top would be called
    # twice.
    return _BatchNorm.forward


NORMS: tuple[Patch, ...] = (
    Patch(_BatchNorm, "forward", around(_forward)),
    Patch(nn.SyncBatchNorm, "forward", _as_plain),
)
