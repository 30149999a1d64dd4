"""What `torch.distributed` tells modules that compute on global tensors: one device, without a process group.

loss = model(x)          x is a global tensor: dist.get_world_size() is 1 in the forward of the model
loss.backward()          and in the backward of an autograd function
dist.get_world_size()    the number of ranks: code outside of modules is the user's
"""

from __future__ import annotations

from functools import lru_cache
from types import FrameType

from torch.utils import _pytree as pytree

from fxdp.eager.tensor import GlobalTensor
from fxdp.torch_compat import arguments_of_modules, one_device_for_good


@lru_cache(maxsize=1)
def show_one_device_to_modules() -> None:
    """Let modules that are called with global tensors see one device, from now on."""
    one_device_for_good(computes_on_global_tensors)


def computes_on_global_tensors(frame: FrameType) -> bool:
    """Return whether a frame runs in a module's forward, or a function's backward, on global tensors."""
    return any(
        type(leaf) is GlobalTensor
        for arguments in arguments_of_modules(frame)
        for leaf in pytree.tree_leaves(arguments)
    )
