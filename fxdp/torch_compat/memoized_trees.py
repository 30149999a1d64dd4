"""Of torch's trees of arguments: taken apart without what only the garbage collector can free.

Torch takes the arguments of each op apart several times, each time by a function that it makes for this and
that refers to itself: half of all that a trace leaves to the garbage collector.
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
    """Inside, `tree_flatten` and what is made of it are quick, to the same trees."""
    with patched((Patch(pytree, "tree_flatten", lambda _: _flattened),)):
        yield


def _flattened(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    if is_leaf is not None:
        return _PLAIN(tree, is_leaf)
    leaves: list[Any] = []
    return leaves, _taken_apart(tree, leaves)


def _taken_apart(tree: Any, leaves: list[Any]) -> pytree.TreeSpec:
    """Put the tree's leaves behind these; its form."""
    kind: Any = type(tree)
    if issubclass(kind, tuple) and kind is not tuple:
        kind = pytree._get_node_type(tree)  # all named tuples count as one kind
    known = pytree.SUPPORTED_NODES.get(kind)
    if known is None:
        leaves.append(tree)
        return pytree._LEAF_SPEC
    children, context = known.flatten_fn(tree)
    return pytree.TreeSpec(kind, context, [_taken_apart(child, leaves) for child in children])
