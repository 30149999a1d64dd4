"""Ops that were traced before are copied: the trace is the same, node by node."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxdp
from fxdp.lowering.inductor import trace as tracing
from fxdp.lowering.inductor.compile import lower_inductor
from fxdp.startup.memoized import op_traces
from fxdp.startup.memoized.op_traces import OpTraces


class _Layers(nn.Module):
    """Layers with what decompositions treat in their own ways: views, several results, indices, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.last = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for norm in self.norms:
            scores = norm(h) @ h.transpose(1, 2)
            h = h + nn.functional.dropout(nn.functional.gelu(scores.softmax(-1) @ h), 0.1)
            h = torch.cat([h[..., :4] - 0.0, h[..., 4:] * -0.0], -1).contiguous()
            values, where = h.max(1)
            h = h + values[:, None] * where[:, None].to(h.dtype)
        return self.last(h.mT).square().mean()


def _lines(gm: fx.GraphModule) -> Iterator[str]:
    """All that a trace says of its nodes, whose memory each value lies in included; nodes by number."""
    first: dict[int, int] = {}
    numbers: dict[fx.Node, str] = {}
    for number, node in enumerate(gm.graph.nodes):
        numbers[node] = f"%{number}"
        value = node.meta.get("val")
        said = []
        for one in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(one, Tensor):
                memory = first.setdefault(one.untyped_storage()._cdata, number)
                said.append(f"{one.dtype} {tuple(one.shape)} {one.stride()} {one.storage_offset()} {memory}")
            else:
                said.append(str(one))
        reads = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        yield f"{number} {node.op} {node.target} {reads} {said} {sorted(node.meta)}"


def test_traces_are_those_of_ops_that_are_run() -> None:
    both: list[tuple[list[str], list[str], bool]] = []
    copied = mock.Mock(side_effect=op_traces._copied)

    def seen(*given: Any, **how: Any) -> Any:
        with mock.patch.object(op_traces, "_copied", copied):
            ours = tracing.trace(*given)
        with mock.patch.object(OpTraces, "call", lambda self, target, args, kwargs: target(*args, **kwargs)):
            plain = tracing.trace(*given)
        both.append((list(_lines(ours.joint)), list(_lines(plain.joint)), given[2].generic))
        raise NotImplementedError("traced, and not compiled")

    with (
        mock.patch.object(lower_inductor, "own", seen),
        mock.patch.dict("os.environ", {"FXDP_CACHE": "0"}),
    ):
        compiled = fxdp.compile(_Layers())
        for size in (4, 6):
            compiled(torch.randint(7, (size, 5)))
    assert [generic for _, _, generic in both] == [False, True]
    assert copied.call_count > 50
    for ours, plain, _ in both:
        assert ours == plain


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (1, True), (1, 1.0)])
def test_equal_numbers_of_other_kinds_are_others(zeros: tuple[float, float]) -> None:
    one, other = (op_traces._kind(number, []) for number in zeros)
    assert one != other


def test_masks_of_one_kind_take_their_own_numbers_of_rows() -> None:
    rows = []

    def taken(x: Tensor, *masks: Tensor) -> list[Tensor]:
        traces = OpTraces()
        found = [traces.call(torch.ops.aten.index.Tensor, (x, [mask]), {}) for mask in masks]
        rows.extend(value.shape[0] for value in found)
        return found

    with FakeTensorMode(shape_env=ShapeEnv()):
        masks = [torch.empty(5, dtype=torch.bool) for _ in range(2)]
        make_fx(taken)(torch.empty(5, 3), *masks)
    one, other = (size.node.expr for size in rows)
    assert one != other


@pytest.mark.parametrize(
    ("ops", "copies"),
    [("slices", 3), ("ranges", 2), ("weights", 8), ("strided", 4), ("neighbours", 4), ("bytes", 6)],
)
def test_where_a_value_begins_makes_no_other_kind_of_it(ops: str, copies: int) -> None:
    aten = torch.ops.aten

    def taken(flat: Tensor, x: Tensor) -> list[Tensor]:
        parts = [call(aten.slice.Tensor, flat, 0, 6 * i, 6 * i + 6) for i in range(3)]
        if ops == "slices":
            return [*parts, call(aten.slice.Tensor, x, 1, 1, 2), call(aten.slice.Tensor, x, 1, 0, 1)]
        if ops == "ranges":
            return [call(aten.narrow.default, flat, 0, i, 6) for i in range(3)]
        weights = [call(aten.view.default, part, [2, 3]) for part in parts]
        if ops == "strided":
            return [call(aten.as_strided.default, weight, [2], [3], 1) for weight in weights]
        if ops == "neighbours":
            return [call(aten.add.Tensor, a, b) for a, b in pairwise(parts)]
        if ops == "bytes":
            return [call(aten.view.dtype, weight, torch.int16) for weight in weights]
        return [call(aten.mm.default, x, call(aten.t.default, weight)) for weight in weights]

    flat, x = torch.arange(18.0), torch.ones(4, 3)
    with mock.patch.object(op_traces, "_copied", mock.Mock(side_effect=op_traces._copied)) as copied:
        traces = OpTraces()

        def call(target: Any, *args: Any) -> Any:
            return traces.call(target, args, {})

        ours = make_fx(taken, tracing_mode="fake")(flat, x)
    assert copied.call_count == copies

    def call(target: Any, *args: Any) -> Any:
        return target(*args)

    plain = make_fx(taken, tracing_mode="fake")(flat, x)
    assert list(_lines(ours)) == list(_lines(plain))
    for one, other in zip(ours(flat, x), plain(flat, x), strict=True):
        assert torch.equal(one, other)
