from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fxdp
from fxdp.errors import PlacementError
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.sizes import B
from fxdp.passes.canonicalize import Canonicalize
from tests.graphs import Sketch, after
from tests.lockstep import check

aten = torch.ops.aten


def test_identities_are_read_through() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    relu = g.call(aten.relu.default, x, type="f32[B, 3]")
    same = g.call(aten.detach.default, relu, type="f32[B, 3]")
    again = g.call(aten.alias.default, same, type="f32[B, 3]")
    gm = g.returns({Output(0): g.call(aten.mul.Tensor, again, relu, type="f32[B, 3]")})
    assert_expected_inline(
        after(Canonicalize(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %relu_default: f32[B, 3] = aten.relu(%x)
  %mul_tensor: f32[B, 3] = aten.mul.Tensor(%relu_default, %relu_default)
  return output 0=%mul_tensor
""",
    )


def test_the_label_of_a_skip_stays_with_its_value() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    relu = g.call(aten.relu.default, x, type="f32[B, 3]", skip="a")
    same = g.call(aten.detach.default, relu, type="f32[B, 3]", skip="b")
    gm = g.returns({Output(0): g.call(aten.mul.Tensor, same, relu, type="f32[B, 3]")})
    assert_expected_inline(
        after(Canonicalize(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %relu_default: f32[B, 3] = aten.relu(%x)  # skip a, b
  %mul_tensor: f32[B, 3] = aten.mul.Tensor(%relu_default, %relu_default)
  return output 0=%mul_tensor
""",
    )


def test_an_identity_that_is_a_result_stays() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    gm = g.returns({Output(0): g.call(aten.alias.default, x, type="f32[B, 3]")})
    assert_expected_inline(
        after(Canonicalize(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %alias_default: f32[B, 3] = aten.alias(%x)
  return output 0=%alias_default
""",
    )


def test_a_detach_that_changes_the_type_stays() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    fresh = g.call(aten.lift_fresh_copy.default, x, type="f64[B, 3]")
    gm = g.returns({Output(0): g.call(aten.relu.default, fresh, type="f64[B, 3]")})
    assert "lift_fresh_copy" in after(Canonicalize(), gm)


def test_unused_ops_are_dropped_and_effects_kept() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    unused = g.call(aten.relu.default, x, type="f32[B, 3]")
    g.call(aten.neg.default, unused, type="f32[B, 3]")
    flag = g.call(aten.any.default, x, type="b8[]")
    g.call(aten._assert_async.msg, flag, "all zero")
    gm = g.returns({Output(0): g.call(aten.cos.default, x, type="f32[B, 3]")})
    assert_expected_inline(
        after(Canonicalize(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %any_default: b8[] = aten.any(%x)
  %_assert_async_msg = aten._assert_async.msg(%any_default, all zero)
  %cos_default: f32[B, 3] = aten.cos(%x)
  return output 0=%cos_default
""",
    )


def test_cat_loses_empty_operands_of_one_dim() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    empty = g.call(aten.zeros.default, [0], type="f32[0]")
    gm = g.returns({Output(0): g.call(aten.cat.default, [empty, x], 1, type="f32[B, 3]")})
    assert_expected_inline(
        after(Canonicalize(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %cat_default: f32[B, 3] = aten.cat([%x], 1)
  return output 0=%cat_default
""",
    )


def test_cat_of_nothing_but_empty_operands_stays() -> None:
    g = Sketch()
    empty = g.call(aten.zeros.default, [0], type="f32[0]")
    gm = g.returns({Output(0): g.call(aten.cat.default, [empty, empty], type="f32[0]")})
    assert "aten.cat([%zeros_default, %zeros_default])" in after(Canonicalize(), gm)


def strided(scatter: bool, strides: list[int], layout: tuple[int, ...] = (3, 1)) -> str:
    """`as_strided` of a captured value with the given memory layout."""
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    relu = g.call(aten.relu.default, x, type="f32[B, 3]")
    relu.meta["val"] = torch.empty(4 * 3).as_strided((4, 3), layout)
    if scatter:
        piece = g.call(aten.view.default, x, [B, 3, 1], type="f32[B, 3, 1]")
        y = g.call(aten.as_strided_scatter.default, relu, piece, [B, 3, 1], strides, 0, type="f32[B, 3]")
    else:
        y = g.call(aten.as_strided.default, relu, [B, 3, 1], strides, type="f32[B, 3, 1]")
    return after(Canonicalize(), g.returns({Output(0): y}))


def test_row_major_strides_are_a_view() -> None:
    """Strides of dims of size 1 mean nothing: adaptive pooling gives them any."""
    for strides in ([3, 1, 1], [3, 1, 99]):
        assert "= aten.view(%relu_default, [B, 3, 1])" in strided(False, strides)
        assert "= aten.reshape(%view_default, [B, 3])" in strided(True, strides)


def test_other_strides_stay() -> None:
    assert "aten.as_strided(" in strided(False, [1, 3, 1])
    assert "aten.as_strided(" in strided(False, [3, 1, 1], layout=(1, 4))
    assert "aten.as_strided_scatter(" in strided(True, [0, 1, 1])


class _Strided(nn.Module):
    """`as_strided` by `read` of a value that depends on a weight."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.conv(x)).sin()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.transpose(1, 3).as_strided((x.shape[0], 12), (48, 2)),
        lambda x: x.contiguous(memory_format=torch.channels_last).as_strided((x.shape[0], 16, 2), (48, 3, 1)),
    ],
)
def test_strides_count_in_the_memory_of_one_device(read: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    check(_Strided(read), (x,), splits=((8,), (5, 2, 0, 1)))


def test_strides_over_memory_with_gaps_are_refused() -> None:
    model = _Strided(lambda x: x[:, :2].as_strided((x.shape[0], 2), (48, 1)))
    where = r"gaps or overlaps(.|\n)*test_canonicalize.py:\d+ `return self.read"
    with pytest.raises(PlacementError, match=where):
        fxdp.plan(model, (torch.randn(8, 3, 4, 4, dtype=torch.float64),), mesh={"dp": 2})


def test_conjugates_are_computed_and_not_marked() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    conj = g.call(aten._conj.default, x, type="f32[B, 3]")
    gm = g.returns({Output(0): g.call(aten._neg_view.default, conj, type="f32[B, 3]")})
    assert_expected_inline(
        after(Canonicalize(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %_conj_default: f32[B, 3] = aten._conj_physical(%x)
  %_neg_view_default: f32[B, 3] = aten.neg(%_conj_default)
  return output 0=%_neg_view_default
""",
    )


def test_conjugates_of_python_numbers_are_constants() -> None:
    """The backward of `1j * x` has them: torch's tensor of the number is the number in a graph."""
    g = Sketch()
    conj = g.call(aten._conj.default, 1j, type="c128[]")
    gm = g.returns(
        {Output(0): g.call(aten.mul.Tensor, g.add(Input(0, "x"), "c128[B]"), conj, type="c128[B]")}
    )
    assert "aten.scalar_tensor(-1j, dtype=c128)" in after(Canonicalize(), gm)
    model = _Strided(lambda x: (torch.exp(1j * x) / (2 - 1j)).real.square().mean(0))
    check(model, (torch.randn(7, 3, 4, 4, dtype=torch.float64),), splits=((4, 3),))
