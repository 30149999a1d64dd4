"""Buckets are summed where their gradients lie, unless somebody reads a gradient as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses import FakeTensorMode

from fxdp.startup.regions.sums_in_place import sum_in_place

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_ROWS = 256


class _Half:
    """A backward that makes gradients `[256, 256]` and sums some of their elements."""

    def __init__(self) -> None:
        self.graph, self._fake = fx.Graph(), FakeTensorMode()
        self.x = self.graph.placeholder("x")
        with self._fake:
            self.x.meta["val"] = torch.empty(_ROWS, _ROWS)

    def call(self, op: Callable[..., object], *args: object) -> fx.Node:
        node = self.graph.call_function(op, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with self._fake:
            node.meta["val"] = op(*values) if getattr(op, "namespace", "") == "aten" else values[0]
        return node

    def gradient(self) -> tuple[fx.Node, fx.Node]:
        """A gradient, and itself as a flat value."""
        made = self.call(aten.mm.default, self.x, self.x)
        return made, self.call(aten.view.default, made, [-1])

    def sum(self, *pieces: fx.Node, group: str = "row/messages", op: str = "sum") -> list[fx.Node]:
        """The sums of flat pieces, taken apart."""
        packed = self.call(aten.cat.default, list(pieces))
        done = self.call(c10d.wait_tensor.default, self.call(c10d.all_reduce.default, packed, op, group))
        found, start = [], 0
        for piece in pieces:
            stop = start + piece.meta["val"].numel()
            found.append(self.call(aten.slice.Tensor, done, 0, start, stop))
            start = stop
        return found

    def rewritten(self, *results: fx.Node) -> str:
        self.graph.output(results)
        sum_in_place(self.graph, "row/messages")
        self.graph.lint()
        return fx.GraphModule({}, self.graph).code.strip().replace("torch.ops.", "")


def test_a_gradient_in_two_buckets() -> None:
    half = _Half()
    (_, a), (_, b) = half.gradient(), half.gradient()
    first, second = (half.call(aten.slice.Tensor, a, 0, *ends) for ends in ((0, 40000), (40000, 65536)))
    assert_expected_inline(
        half.rewritten(*half.sum(b, first), *half.sum(second, half.gradient()[1])),
        """\
def forward(self, x):
    mm_default = aten.mm.default(x, x)
    view_default = aten.view.default(mm_default, [-1]);  mm_default = None
    mm_default_1 = aten.mm.default(x, x)
    view_default_1 = aten.view.default(mm_default_1, [-1]);  mm_default_1 = None
    slice_tensor = aten.slice.Tensor(view_default, 0, 0, 40000)
    slice_tensor_1 = aten.slice.Tensor(view_default, 0, 40000, 65536);  view_default = None
    start_sums_default = fxdp.start_sums.default([view_default_1, slice_tensor], 'row/messages');  view_default_1 = slice_tensor = None
    finish_sums_default = fxdp.finish_sums.default(start_sums_default);  start_sums_default = None
    getitem = finish_sums_default[0]
    getitem_1 = finish_sums_default[1];  finish_sums_default = None
    mm_default_2 = aten.mm.default(x, x);  x = None
    view_default_2 = aten.view.default(mm_default_2, [-1]);  mm_default_2 = None
    start_sums_default_1 = fxdp.start_sums.default([slice_tensor_1, view_default_2], 'row/messages');  slice_tensor_1 = view_default_2 = None
    finish_sums_default_1 = fxdp.finish_sums.default(start_sums_default_1);  start_sums_default_1 = None
    getitem_2 = finish_sums_default_1[0]
    getitem_3 = finish_sums_default_1[1];  finish_sums_default_1 = None
    return (getitem, getitem_1, getitem_2, getitem_3)""",  # noqa: E501 - generated code
    )


def _read_again(half: _Half) -> list[fx.Node]:
    made, flat = half.gradient()
    return [*half.sum(flat, half.gradient()[1]), made]


def _shown_twice(half: _Half) -> list[fx.Node]:
    made, flat = half.gradient()
    return [*half.sum(flat, half.call(aten.view.default, made, [_ROWS * _ROWS]))]


def _twice_in_one_bucket(half: _Half) -> list[fx.Node]:
    _, flat = half.gradient()
    return half.sum(flat, flat)


def _parts_that_overlap(half: _Half) -> list[fx.Node]:
    _, flat = half.gradient()
    ends = ((0, 40000), (39999, 65536))
    return half.sum(*(half.call(aten.slice.Tensor, flat, 0, *one) for one in ends))


def _an_input(half: _Half) -> list[fx.Node]:
    return half.sum(half.call(aten.view.default, half.x, [-1]), half.gradient()[1])


def _a_sum_of_before(half: _Half) -> list[fx.Node]:
    (first, _) = half.sum(half.gradient()[1], half.gradient()[1])
    return half.sum(half.call(aten.view.default, first, [-1]), half.gradient()[1])


def _with_gaps(half: _Half) -> list[fx.Node]:
    made, _ = half.gradient()
    return half.sum(half.call(aten.select.int, made, 1, 0), half.gradient()[1])


def _of_other_ranks(half: _Half) -> list[fx.Node]:
    return half.sum(half.gradient()[1], half.gradient()[1], group="row/data")


def _an_extremum(half: _Half) -> list[fx.Node]:
    return half.sum(half.gradient()[1], half.gradient()[1], op="max")


def _small(half: _Half) -> list[fx.Node]:
    made = half.call(aten.sum.dim_IntList, half.x, [0])
    return half.sum(made, half.call(aten.sum.dim_IntList, half.x, [1]))


def _read_as_one(half: _Half) -> list[fx.Node]:
    found = half.sum(half.gradient()[1], half.gradient()[1])
    return [*found, half.call(aten.neg.default, found[0].args[0])]


def _computed_with(half: _Half) -> list[fx.Node]:
    """Then the sums belong into a segment, which Inductor compiles."""
    a, b = half.sum(half.gradient()[1], half.gradient()[1])
    return [half.call(aten.neg.default, half.call(aten.add.Tensor, a, b)), b]


@pytest.mark.parametrize(
    "write",
    [
        _read_again, _shown_twice, _twice_in_one_bucket, _parts_that_overlap, _an_input, _with_gaps,
        _a_sum_of_before,
        _of_other_ranks, _an_extremum, _small, _read_as_one, _computed_with,
    ],
)  # fmt: skip
def test_what_is_read_otherwise_is_laid_end_to_end(write: Callable[[_Half], list[fx.Node]]) -> None:
    half = _Half()
    assert "start_sums" not in half.rewritten(*write(half))
