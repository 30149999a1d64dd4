"""Objects that carry tensors: registration with torch's pytree, so that their tensors are inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def register_containers(tree: Any) -> bool:
    """Register with torch's pytree the classes in `tree` that carry tensors but that pytree treats as leaves.

    Examples are plain dataclasses, and objects with tensors among their attributes, as transformers' caches.
    Returns whether any class was registered.
    """
    found = False
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(tree) if _carries_tensors(leaf)}:
        found = True
        for cls in unknown:
            pytree.register_pytree_node(
                cls, _flatten_object, _unflattener(cls), flatten_with_keys_fn=_flatten_with_keys
            )
    return found


def _carries_tensors(value: Any, depth: int = 3) -> bool:
    """Return whether an object that pytree treats as a leaf has tensors among its attributes."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or not hasattr(value, "__dict__") or depth == 0:
        return False
    held = pytree.tree_leaves(list(vars(value).values()))
    return any(isinstance(leaf, torch.Tensor) or _carries_tensors(leaf, depth - 1) for leaf in held)


def _flatten_object(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(f.name for f in dataclasses.fields(value)) if dataclasses.is_dataclass(value) else None
    names = names or tuple(vars(value))
    return [getattr(value, name) for name in names], names


def _flatten_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[str, ...]]:
    values, names = _flatten_object(value)
    return [(pytree.GetAttrKey(name), one) for name, one in zip(names, values, strict=True)], names


def _unflattener(cls: type) -> Callable[[Iterable[Any], Any], Any]:
    def unflatten(values: Iterable[Any], names: Any) -> Any:
        made: Any = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return unflatten
