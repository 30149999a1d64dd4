"""Flatten pytrees of arguments without garbage that only the cyclic collector can free.

Torch flattens the arguments of each op several times, each time by a new closure that refers to itself: half
of the garbage that a trace leaves to the collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import _pytree as pytree

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut

__all__ = ["memoized_trees"]

_PLAIN = pytree.tree_flatten


@shortcut("memoized_trees")
def memoized_trees() -> Iterator[None]:
    """Make `tree_flatten` and functions built on `tree_flatten` fast inside the block, with equal results."""
    with patched((Patch(pytree, "tree_flatten", lambda _: _flattened),)):
        yield


def _flattened(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    if is_leaf is not None:
        return _PLAIN(tree, is_leaf)
    leaves: list[Any] = []
    return leaves, _taken_apart(tree, leaves)


def _taken_apart(tree: Any, leaves: list[Any]) -> pytree.TreeSpec:
    """Append the leaves of a tree to `leaves`, and return the tree's spec."""
    kind: Any = type(tree)
    if issubclass(kind, tuple) and kind is not tuple:
        kind = pytree._get_node_type(tree)  # all named tuples share one node type
    known = pytree.SUPPORTED_NODES.get(kind)
    if known is None:
        leaves.append(tree)
        return pytree._LEAF_SPEC
    children, context = known.flatten_fn(tree)
    return pytree.TreeSpec(kind, context, [_taken_apart(child, leaves) for child in children])
