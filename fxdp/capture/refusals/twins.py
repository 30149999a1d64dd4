"""Copies of a model to run aside."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def twin_of(module: nn.Module) -> nn.Module:
    """A deep copy; tensors that were computed from parameters and left in attributes are copied as values.

    `copy.deepcopy` refuses such tensors: the `weight` that `torch.nn.utils.weight_norm` computes anew before
    each forward, or what a forward kept, in lists and dicts, too.
    """
    computed = {
        id(value): value.detach().clone()
        for child in module.modules()
        for value in pytree.tree_leaves(vars(child))
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, dict(computed))
