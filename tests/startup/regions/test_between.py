"""Collectives of buckets stand between segments where no layer needs them inside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxdp.ir.ops.parameter_shards import start_all_gather_shards
from fxdp.startup.regions.between import InsideError, calls_between, places_between

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class _Half:
    """A half that is written call by call."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.weight = self.graph.placeholder("weight")

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def sum_of(self, *values: fx.Node) -> fx.Node:
        """A bucket of gradients."""
        packed = self(aten.cat.default, [self(aten.view.default, v, [-1]) for v in values])
        done = self(c10d.wait_tensor.default, self(c10d.all_reduce.default, packed, "sum", "dp"))
        return self(aten.slice.Tensor, done, 0, 0, 4)

    def gather(self, *after: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The start of a gather, and its wait."""
        start = self(start_all_gather_shards, [self.weight], [4], 2, "dp", list(after))
        return start, self(c10d.wait_tensor.default, start)

    def places(self, regions: list[list[fx.Node]], *results: fx.Node, hides: bool = True) -> list[list[str]]:
        """Where the calls stand that may stand between these segments, by name."""
        self.graph.output(results)
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        between = calls_between(self.graph)
        found = places_between([n for n in self.graph.nodes if n in between], regions, position, hides=hides)
        return [[node.name for node in part] for part in found]


def test_a_sum_inside_of_a_layer_comes_after_it() -> None:
    """What packs its gradients goes with it, and what is cut out of it."""
    half = _Half()
    a = half(aten.sin.default, half.x)
    cut = half.sum_of(a)
    b = half(aten.sin.default, a)
    c = half(aten.sin.default, b)
    assert half.places([[a, b], [c]], c, cut) == [
        [], ["view_default", "cat_default", "all_reduce_default", "wait_tensor_default", "slice_tensor"], [],
    ]  # fmt: skip


def test_a_gradient_in_two_buckets_is_put_together_after_both() -> None:
    half = _Half()
    a = half(aten.sin.default, half.x)
    one, two = half.sum_of(a), half.sum_of(a)
    full = half(aten.view.default, half(aten.cat.default, [one, two]), [2, 4])
    b = half(aten.sin.default, a)
    found = half.places([[a, b]], b, full)
    assert found[0] == []
    assert found[1][-2:] == ["cat_default_2", "view_default_2"]


def test_a_sum_that_a_layer_reads_belongs_to_it() -> None:
    half = _Half()
    a = half(aten.sin.default, half.x)
    b = half(aten.mul.Tensor, half.sum_of(a), a)
    assert half.places([[a], [b]], b) == [[], [], []]


def test_a_gather_comes_before_the_layer_that_reads_it() -> None:
    """Its start after the layer that makes what it waits for; a cast of parameters goes with it."""
    half = _Half()
    half.weight = half(aten.cos.default, half.weight)
    a = half(aten.sin.default, half.x)
    _, full = half.gather(a)
    b = half(aten.sin.default, a)
    c = half(aten.mul.Tensor, b, half(aten.view.default, full, [4]))
    assert half.places([[a, b], [c]], c) == [
        ["cos_default"], ["start_all_gather_shards_default", "wait_tensor_default", "view_default"], [],
    ]  # fmt: skip


def test_a_gather_that_starts_in_the_layer_that_reads_it_comes_before_it() -> None:
    half = _Half()
    a = half(aten.sin.default, half.x)
    start, full = half.gather(a)
    b = half(aten.mul.Tensor, a, full)
    assert half.places([[a, b]], b) == [[start.name, full.name], []]


def test_a_gather_does_not_come_before_a_sum_that_starts_earlier() -> None:
    half = _Half()
    a = half(aten.sin.default, half.x)
    cut = half.sum_of(a)
    b = half(aten.mul.Tensor, a, half.gather(a)[1])
    with pytest.raises(InsideError, match="belongs inside of segment 0"):
        half.places([[a, b]], b, cut)


def test_no_more_is_gathered_at_once_than_in_the_half() -> None:
    half = _Half()
    a = half(aten.sin.default, half.x)
    b = half(aten.mul.Tensor, a, half.gather(a)[1])
    c = half(aten.mul.Tensor, b, half.gather(b)[1])
    with pytest.raises(InsideError, match="start_all_gather_shards_default belongs inside of segment 0"):
        half.places([[a, b, c]], c)


@pytest.mark.parametrize("hides", [True, False])
def test_a_gather_that_work_hides_is_not_waited_for_at_once(hides: bool) -> None:
    """But where nothing travels."""
    half = _Half()
    a = half(aten.sin.default, half.x)
    start = half.gather(a)[0]
    half.graph.erase_node(next(iter(start.users)))
    b = half(aten.sin.default, half(aten.sin.default, a))
    c = half(aten.sin.default, b)
    full = half(c10d.wait_tensor.default, start)
    d = half(aten.mul.Tensor, c, full)
    first, second = [a, *b.all_input_nodes, b], [c, d]
    if not hides:
        assert half.places([first, second], d, hides=False) == [[], [start.name, full.name], []]
        return
    with pytest.raises(InsideError, match="start_all_gather_shards_default belongs inside of segment 0"):
        half.places([first, second], d)


def test_sums_start_in_the_order_of_the_half() -> None:
    """A gather of inputs alone could come first, but not before a sum that starts earlier."""
    half = _Half()
    a = half(aten.sin.default, half.x)
    cut = half.sum_of(a)
    start, full = half.gather()
    b = half(aten.sin.default, a)
    c = half(aten.mul.Tensor, b, full)
    found = half.places([[a, b], [c]], c, cut)
    names = [name for part in found for name in part]
    assert names.index("all_reduce_default") < names.index(start.name)
