"""Map the tensors of a batch, in whatever collections collators and models use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the tree with `change(tensor)` for each tensor; of mappings and sequences, copies."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(value, change) for key, value in tree.items()}
        if all(changed[key] is tree[key] for key in changed):
            return tree
        if type(tree) is dict:
            return changed
        made: Any = copy.copy(tree)
        for key, value in changed.items():
            made[key] = value
        return made
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        values = [map_tensors(value, change) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield what is no collection."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_of(value)
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        for value in tree:
            yield from leaves_of(value)
    else:
        yield tree


def can_be_cut(leaf: Any) -> bool:
    """Return whether a leaf is a plain tensor with a dim along which it may be cut."""
    plain = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested
    return plain and leaf.dim() > 0
