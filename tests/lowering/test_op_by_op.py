from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.lowering.op_by_op import op_by_op, pack_sums, reads_again

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _summed(op: str = "sum", shown: bool = False, dim: int = 0) -> fx.GraphModule:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    line = graph.call_function(aten.cat.default, ([a, b], dim) if dim else ([a, b],))
    done = graph.call_function(
        c10d.wait_tensor.default, (graph.call_function(c10d.all_reduce.default, (line, op, "group")),)
    )
    graph.output((done, line) if shown else (done,))
    return fx.GraphModule({}, graph)


def test_what_is_packed_for_a_sum_alone_is_packed_where_it_is_summed() -> None:
    gm = _summed()
    code = op_by_op(gm)
    assert_expected_inline(
        code.__self__.code.strip().replace("torch.ops.", ""),  # type: ignore[attr-defined]
        """\
def forward(self, args_list):
    args_iter = iter(args_list)
    a = next(args_iter)
    b = next(args_iter)
    args_list.clear()
    start_sum_default = fxdp.start_sum.default([a, b], 'group');  a = b = None
    wait_tensor_default = _c10d_functional.wait_tensor.default(start_sum_default);  start_sum_default = None
    return (wait_tensor_default,)""",
    )
    assert "all_reduce" in gm.code  # the graph stays as it is


def test_a_buckets_gradients_are_taken_out_by_one_call() -> None:
    gm = _parted([(0, 4), (4, 6), (6, 2**63 - 1)])
    code = op_by_op(gm)
    assert_expected_inline(
        code.__self__.code.strip().replace("torch.ops.", ""),  # type: ignore[attr-defined]
        """\
def forward(self, args_list):
    args_iter = iter(args_list)
    x = next(args_iter)
    args_list.clear()
    tensor_split = torch.tensor_split(x, [4, 6, 9223372036854775807]);  x = None
    getitem = tensor_split[0]
    getitem_1 = tensor_split[1]
    getitem_2 = tensor_split[2];  tensor_split = None
    return [getitem, getitem_1, getitem_2]""",
    )
    for expected, found in zip(gm(torch.arange(9)), code([torch.arange(9)]), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("ends", [[(0, 4), (5, 6)], [(1, 4), (4, 6)], [(0, 4), (4, -1)], [(0, 4), (0, 4)]])
def test_parts_that_do_not_follow_one_another_are_taken_out_as_they_are(ends: list[tuple[int, int]]) -> None:
    gm = _parted(ends)
    code = op_by_op(gm)
    assert "tensor_split" not in code.__self__.code  # type: ignore[attr-defined]
    for expected, found in zip(gm(torch.arange(9)), code([torch.arange(9)]), strict=True):
        assert torch.equal(expected, found)


def _parted(ends: list[tuple[int, int]]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.slice.Tensor, (x, 0, *end)) for end in ends])
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("other", [{"op": "max"}, {"shown": True}, {"dim": 1}])
def test_what_is_read_otherwise_is_summed_as_it_is(other: dict[str, object]) -> None:
    code = op_by_op(_summed(**other))  # type: ignore[arg-type]
    assert "start_sum" not in code.__self__.code  # type: ignore[attr-defined]


@pytest.mark.parametrize("read", ["nothing", "itself", "the value it shows"])
def test_what_is_packed_and_read_again_is_packed_apart_from_what_others_read(read: str) -> None:
    """Inductor would sum in the memory in which the one who reads it looks for the terms."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.relu.default, (x,))
    flat = graph.call_function(aten.view.default, (made, [4]))
    line = graph.call_function(aten.cat.default, ([flat, flat],))
    done = graph.call_function(
        c10d.wait_tensor.default, (graph.call_function(c10d.all_reduce.default, (line, "sum", "group")),)
    )
    other = {"nothing": x, "itself": flat, "the value it shows": made}[read]
    graph.output((done, graph.call_function(aten.neg.default, (other,))))
    assert pack_sums(graph, reads_again) is (read != "nothing")
