"""Trees are taken apart as torch takes them apart, and leave nothing to the garbage collector."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fxdp.startup.memoized.memoized_trees import memoized_trees

Pair = namedtuple("Pair", ["one", "two"])


class Named(Pair):
    """A named tuple of the user's own."""


class Plain(tuple):
    """A tuple that torch does not know."""


TREES = [
    3,
    None,
    (),
    ((torch.ones(2), [1, (2, None)]), {"a": 1, "b": {}}),
    (Pair(1, [2]), Named(3, 4), Plain((5, 6))),
    [OrderedDict(b=1, a=(2,)), defaultdict(list, {"a": [1]}), deque([1, 2], maxlen=3)],
    torch.max(torch.ones(2, 2), 0),
    torch.Size([2, 3]),
    {2: slice(1, 2), "x": [{3}, range(2), "text"]},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
@pytest.mark.parametrize("is_leaf", [None, lambda node: type(node) is list])
def test_trees_are_torch_s_own(tree: Any, is_leaf: Any) -> None:
    leaves, form = pytree.tree_flatten(tree, is_leaf)
    mapped = pytree.tree_map(lambda leaf: [leaf], tree, is_leaf=is_leaf)
    with memoized_trees():
        found, own = pytree.tree_flatten(tree, is_leaf)
        again = pytree.tree_map(lambda leaf: [leaf], tree, is_leaf=is_leaf)
    assert own == form
    assert repr(own) == repr(form)
    assert len(found) == len(leaves)
    assert all(a is b for a, b in zip(found, leaves, strict=True))
    assert repr(again) == repr(mapped)


def test_nothing_is_left_for_the_garbage_collector() -> None:
    def left() -> int:
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                pytree.tree_flatten(((1, 2), {"a": 3}))
            return gc.collect()
        finally:
            gc.enable()

    assert left() > 0
    with memoized_trees():
        assert left() == 0


def test_torch_is_put_back() -> None:
    before = pytree.tree_flatten
    with memoized_trees():
        assert pytree.tree_flatten is not before
    assert pytree.tree_flatten is before
