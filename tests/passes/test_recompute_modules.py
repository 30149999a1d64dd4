from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.errors import InputError
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.graph.signature import Gradient, Input, Output, Parameter, Tangent
from fxdp.ir.types.placements import P, R, S
from fxdp.passes import RecomputeModules
from tests.graphs import Sketch, after

aten = torch.ops.aten


def two_blocks() -> fx.GraphModule:
    """In each of two blocks a gelu of what the one before gives, in the first a draw and a sum over ranks."""
    g = Sketch()
    w = g.add(Parameter("w"), "f32[4, 4]", R)
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    tangent = g.add(Tangent(0), "f32[B, 4]", S(0))
    rows = {"type": "f32[B, 4]", "at": S(0)}

    def place(block: str) -> dict[str, Location]:
        return {"location": Location(module=f"blocks.{block}.act")}

    h = g.call(aten.mm.default, x, w, reads=(S(0), R), name="h", **rows, **place("0"))
    mask = g.call(aten.rand_like.default, h, reads=(S(0),), name="mask", **rows, **place("0"))
    a = g.call(aten.gelu.default, h, reads=(S(0),), name="a", **rows, **place("0"))
    kept = g.call(aten.mul.Tensor, a, mask, reads=(S(0), S(0)), name="kept", **rows, **place("0"))
    summed = {"type": "f32[4]", "at": P, "reads": (S(0),), **place("0")}
    total = g.call(aten.sum.dim_IntList, kept, [0], name="total", **summed)
    centred = g.call(aten.sub.Tensor, kept, total, reads=(S(0), R), name="centred", **rows, **place("0"))
    y = g.call(aten.gelu.default, centred, reads=(S(0),), name="y", **rows, **place("1"))
    z = g.call(aten.sin.default, y, reads=(S(0),), name="z", **rows, **place("1"))
    back = {"backward": True, **rows}
    dy = g.call(aten.mul.Tensor, tangent, y, reads=(S(0), S(0)), name="dy", **back)
    dk = g.call(aten.mul.Tensor, dy, centred, reads=(S(0), S(0)), name="dk", **back)
    dt = g.call(aten.mul.Tensor, dk, total, reads=(S(0), R), name="dt", **back)
    da = g.call(aten.mul.Tensor, dt, kept, reads=(S(0), S(0)), name="da", **back)
    return g.returns({Output(0): z, Gradient(Input(0, "x")): da}, (S(0), S(0)))


def test_what_a_backward_reads_is_computed_again_from_what_is_saved() -> None:
    gm = two_blocks()
    assert_expected_inline(
        after(RecomputeModules(("blocks.*",)), gm),
        """\
mesh(dp=2)
  %w: f32[4, 4] {dp=R} = param(w)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %tangent: f32[B, 4] {dp=S(0)} = tangent(0)
  %h: f32[B, 4] {dp=S(0)} = aten.mm(%x, %w)
  %mask: f32[B, 4] {dp=S(0)} = aten.rand_like(%h)
  %a: f32[B, 4] {dp=S(0)} = aten.gelu(%h)
  %kept: f32[B, 4] {dp=S(0)} = aten.mul.Tensor(%a, %mask)
  %total: f32[4] {dp=P(sum)} = aten.sum.dim_IntList(%kept, [0])
  %centred: f32[B, 4] {dp=S(0)} = aten.sub.Tensor(%kept, %total)
  %y: f32[B, 4] {dp=S(0)} = aten.gelu(%centred)
  %z: f32[B, 4] {dp=S(0)} = aten.sin(%y)
  %y_1: f32[B, 4] {dp=S(0)} = aten.gelu(%centred)
  %dy: f32[B, 4] {dp=S(0)} = aten.mul.Tensor(%tangent, %y_1)
  %dk: f32[B, 4] {dp=S(0)} = aten.mul.Tensor(%dy, %centred)
  %dt: f32[B, 4] {dp=S(0)} = aten.mul.Tensor(%dk, %total)
  %h_1: f32[B, 4] {dp=S(0)} = aten.mm(%x, %w)
  %a_1: f32[B, 4] {dp=S(0)} = aten.gelu(%h_1)
  %kept_1: f32[B, 4] {dp=S(0)} = aten.mul.Tensor(%a_1, %mask)
  %da: f32[B, 4] {dp=S(0)} = aten.mul.Tensor(%dt, %kept_1)
  return output 0=%z, gradient input(x)=%da
""",
    )
    marks = {node.name: meta(node).recompute for node in gm.graph.nodes if meta(node).recompute}
    assert {name for name, mark in marks.items() if mark == "saved"} == {"mask", "centred"}
    copied = {"h", "a", "kept", "y"}
    assert marks.keys() - {"mask", "centred"} == copied | {f"{name}_1" for name in copied}


def test_names_that_no_module_has() -> None:
    with pytest.raises(InputError, match=r"'block\.0'; near it: blocks\.0"):
        RecomputeModules(("blocks.1", "block.0")).run(two_blocks(), None)  # type: ignore[arg-type]
