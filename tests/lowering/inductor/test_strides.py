"""What a half hands on lies in memory as it was traced, whatever Inductor would rather do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxdp.lowering.inductor.strides import channels_last, copied, moved, of_that_shape, results
from fxdp.torch_compat import compile_with_inductor, release_before, static_mode

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
aten = torch.ops.aten


def _part_of_a_larger_buffer(x: Tensor) -> tuple[Tensor, ...]:
    y = aten.exp.default(x)
    full = aten.cat.default([y, aten.neg.default(x)], 2)
    return aten.permute.default(y, [0, 2, 1]), aten.view.default(y, [8, 3]), aten.mm.default(
        aten.view.default(full, [8, 6]), aten.view.default(full, [6, 8])
    )  # fmt: skip


def _part_of_what_is_never_whole(x: Tensor) -> tuple[Tensor, ...]:
    y = aten.permute.default(aten.exp.default(x), [0, 2, 1])
    return aten.slice.Tensor(y, 2, 1, 3), aten.slice.Tensor(y, 1, 0, 2)


HALVES = (_part_of_a_larger_buffer, _part_of_what_is_never_whole)


@pytest.mark.parametrize("half", HALVES)
def test_a_result_that_inductor_laid_out_in_another_way_is_copied(half: Callable[..., Any]) -> None:
    gm = fx.symbolic_trace(half)
    x = torch.randn(2, 4, 3)
    with static_mode() as fake_mode:
        example = fake_mode.from_tensor(x)
        FakeTensorProp(gm, fake_mode).propagate_dont_convert_inputs(example)
    traced = [n.meta["val"].stride() for n in results(gm)]
    count = len(traced)

    def compiled(which: list[int]) -> tuple[list[int], list[Tensor]]:
        half = copied(gm, which)
        half.graph.output_node().meta["user_visible_output_idxs"] = list(range(count))
        run, strides = compile_with_inductor(
            half, [example], fake_mode, backward=False, inference=False, fixed=0
        )
        return moved(gm, strides, range(count)), list(run([x]))

    others, found = compiled([])
    assert others == [i for i in range(count) if found[i].stride() != traced[i]]
    still, found = compiled(others or [0, 1])
    assert still == []
    assert [t.stride() for t in found] == traced
    for got, expected in zip(found, half(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_part_with_gaps_is_copied_at_any_size() -> None:
    def half(n: int, x: Tensor) -> tuple[Tensor, ...]:
        rows = aten.slice.Tensor(aten.exp.default(aten.view.default(x, [n, 12])), 1, 0, 8)
        return (aten.view.default(rows, [n, 4, 2]),)

    gm, x, fake_mode = fx.symbolic_trace(half), torch.randn(5, 4, 3), FakeTensorMode(shape_env=ShapeEnv())
    dims = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    example = fake_mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
    inputs = [example.shape[0], example]
    FakeTensorProp(gm, fake_mode).propagate_dont_convert_inputs(*inputs)
    copy = copied(gm, [0])
    copy.graph.output_node().meta["user_visible_output_idxs"] = [0]
    run, strides = compile_with_inductor(copy, inputs, fake_mode, backward=False, inference=False, fixed=0)
    assert moved(gm, strides, [0]) == []
    for batch in (x, torch.randn(3, 4, 3)):
        (found,) = run([len(batch), batch])
        assert found.stride() == (12, 2, 1)
        torch.testing.assert_close(found, half(len(batch), batch)[0])


@pytest.mark.skipif(release_before(2, 12), reason="this torch copies no value of unknown size")
def test_rows_that_values_select_are_copied() -> None:
    def half(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        rows = aten.index.Tensor(x, [mask])
        return aten.permute.default(rows, [2, 1, 0]), aten.slice.Tensor(rows, 2, 0, 2)

    gm, fake_mode = fx.symbolic_trace(half), FakeTensorMode(shape_env=ShapeEnv())
    x, mask = torch.randn(5, 4, 3), torch.tensor([True, False, True, True, False])
    FakeTensorProp(gm, fake_mode).propagate(x, mask)
    copy = copied(gm, [0, 1])
    for found, expected in zip(copy(x, mask), half(x, mask), strict=True):
        assert found.stride() == expected.stride()
        assert found.untyped_storage().data_ptr() != expected.untyped_storage().data_ptr()
        torch.testing.assert_close(found, expected)


def test_strides_of_single_elements_and_of_nothing_do_not_count() -> None:
    gm = fx.symbolic_trace(lambda a, b, c: (a, b, c, None))
    for node, size in zip(gm.graph.find_nodes(op="placeholder"), [(1, 3), (0, 3), (2, 3)], strict=True):
        node.meta["val"] = torch.empty(size)
    assert moved(gm, [(7, 1), (9, 9), (3, 1), None], range(4)) == []
    assert moved(gm, [(7, 2), (9, 9), (1, 2), None], range(4)) == [0, 2]
    assert moved(gm, [(7, 2), (9, 9), (1, 2), None], range(2)) == [0]
    assert moved(gm, [], range(4)) == []


@pytest.mark.parametrize("size", [(4, 2, 3, 5), (4, 2, 3, 5, 2), (4, 2, 1, 1), (4, 2, 3)])
def test_a_weight_s_memory_in_the_strides_of_channels_last(size: tuple[int, ...]) -> None:
    weight = torch.randn(size)
    turned = of_that_shape(weight)
    assert turned.shape == weight.shape
    assert turned.data_ptr() == weight.data_ptr()
    assert channels_last(turned).data_ptr() == turned.data_ptr()  # so laid out that nobody copies it
    other = weight.transpose(0, 1)
    assert of_that_shape(other) is other
