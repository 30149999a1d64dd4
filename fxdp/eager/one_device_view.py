"""What `torch.distributed` tells modules that compute on global tensors: one device, without a process group.

loss = model(x)          x is a global tensor: dist.get_world_size() is 1 in the forward of the model
loss.backward()          and in the backward of an autograd function
dist.get_world_size()    the number of ranks: code outside of modules is the user's
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

from torch.utils import _pytree as pytree

from fxdp.eager.tensor import GlobalTensor
from fxdp.torch_compat import arguments_of_modules, one_device_for_good

_TOOK_GLOBAL_VALUES = "_fxdp_took_global_values"


@lru_cache(maxsize=1)
def show_one_device_to_modules() -> None:
    """Let modules that are called with global tensors see one device, from now on."""
    one_device_for_good(_computes_on_global_tensors)


def _computes_on_global_tensors(frame: FrameType) -> bool:
    """Return whether a frame runs in a module's forward, or a function's backward, on global tensors.

    So does a method of a metric whose states are those of the global batch.
    """
    arguments = (leaf for each in arguments_of_modules(frame) for leaf in pytree.tree_leaves(each))
    return any(type(leaf) is GlobalTensor for leaf in arguments) or any(
        map(_has_global_states, _metrics_in(frame))
    )


def note_plain_write() -> None:
    """Note that a plain tensor gets global values: in a metric's `update`, it is a state of this metric."""
    for metric in _metrics_in(sys._getframe(1)):
        metric.__dict__[_TOOK_GLOBAL_VALUES] = True


def _metrics_in(frame: FrameType | None) -> Iterator[Any]:
    """Yield the metrics of torchmetrics in whose methods a frame runs."""
    module = sys.modules.get("torchmetrics.metric")
    while module is not None and frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, module.Metric):
                yield owner
        frame = frame.f_back


def _has_global_states(metric: Any) -> bool:
    states = (getattr(metric, name, None) for name in metric._defaults)
    return _TOOK_GLOBAL_VALUES in vars(metric) or any(
        type(leaf) is GlobalTensor for leaf in pytree.tree_leaves(list(states))
    )
