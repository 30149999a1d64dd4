"""What is traced for Inductor."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import Cause, Location
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.placements import P, R, S
from fxdp.lowering.eager import forward_inputs
from fxdp.lowering.inductor.collective_order import collectives
from fxdp.lowering.inductor.trace import joint_function
from fxdp.passes.emit_program import EmitProgram
from fxdp.torch_compat import static_mode, symbolic_sizes, trace_for_inductor
from tests.graphs import Sketch, mesh

aten = torch.ops.aten

_CPU = torch.device("cpu")
_SIZES = (("B", 5), ("b", 3), ("offset", 0), ("b_max", 3))


def _sends(type_: str) -> fx.GraphModule:
    """A gather and a broadcast."""
    g = Sketch()
    g.size("B"), g.size("b"), g.size("offset")
    x, y = g.add(Input(0, "x"), f"{type_}[B]", S(0)), g.add(Input(1, "y"), f"{type_}[4]", R)
    cause = Cause("a", "b", Location())
    parts = g.call(
        redistributions.all_gather, x, 0, 1, 1, type=f"{type_}[B]", at=R, reads=(S(0),), cause=cause
    )
    full = g.call(redistributions.wait, parts, type=f"{type_}[B]", at=R, reads=(R,))
    sent = g.call(redistributions.broadcast, y, type=f"{type_}[4]", at=R, reads=(R,), cause=cause)
    first = g.call(redistributions.wait, sent, type=f"{type_}[4]", at=R, reads=(R,))
    gm = g.returns({Output(0): full, Output(1): first}, (R, R))
    return EmitProgram(_SIZES, even=False).run(gm, mesh())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_no_bools_are_sent_and_all_dtypes_return(dtype: torch.dtype) -> None:
    """Inductor would make int64 of bools, which `masked_scatter` and an index do not take for masks."""
    gm = _sends({torch.bool: "b8", torch.int64: "i64"}[dtype])
    mode = static_mode()
    with mode:
        values = {
            "x": torch.empty(3, dtype=dtype), "y": torch.empty(4, dtype=dtype),
            "rows": torch.empty(5, dtype=torch.int64),
        }  # fmt: skip
    inputs = forward_inputs(gm.graph)
    function = joint_function(gm, inputs, [], _CPU)
    traced = trace_for_inductor(function, mode, [values[n.name] for n in inputs], [])
    sent = [n.args[0] for n in traced.graph.nodes if n.target in _TAKE_A_NUMBER]
    assert [_dtype(n) for n in sent] == [torch.uint8 if dtype == torch.bool else dtype] * 2
    results: Any = traced.graph.output_node().args[0]
    assert [_dtype(n) for n in results] == [dtype] * 2


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_a_number_beside_float64_is_the_tensor_that_it_is_read_from(dtype: str) -> None:
    """As Inductor's kernels take numbers as float32."""
    g = Sketch()
    x, scale = g.add(Input(0, "x"), f"{dtype}[4]", R), g.add(Input(1, "scale"), "f64[]", R)
    read = g.call(aten._local_scalar_dense.default, scale, type="int(u0)", reads=(R,))
    rest = g.call(operator.sub, 1, read, type="int(1-u0)")
    y = g.call(aten.mul.Scalar, x, rest, type=f"{dtype}[4]", at=R, reads=(R,))
    gm = g.returns({Output(0): y}, (R,))
    mode, _ = symbolic_sizes({"B": 5})
    with mode:
        kinds = {"f32": torch.float32, "f64": torch.float64}
        values = [torch.empty(4, dtype=kinds[dtype]), torch.empty((), dtype=torch.float64)]
    traced = trace_for_inductor(joint_function(gm, forward_inputs(gm.graph), [], _CPU), mode, values, [])
    traced.graph.eliminate_dead_code()
    called = {node.target for node in traced.graph.nodes}
    assert (aten._local_scalar_dense.default in called) is (dtype == "f32")
    assert (aten.mul.Tensor in called) is (dtype == "f64")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_of_which_one_rank_keeps_the_value_runs_on_all(rank: int) -> None:
    """Nobody else needs it; if they left it out, their next one would meet it."""
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[4]", P)
    cause = Cause("a", "b", Location())
    pending = g.call(redistributions.all_reduce, x, "sum", type="f32[4]", at=R, reads=(P,), cause=cause)
    full = g.call(redistributions.wait, pending, type="f32[4]", at=R, reads=(R,))
    kept = g.call(redistributions.partial, full, type="f32[4]", at=P, reads=(R,), cause=cause)
    pending = g.call(redistributions.all_reduce, kept, "sum", type="f32[4]", at=R, reads=(P,), cause=cause)
    again = g.call(redistributions.wait, pending, type="f32[4]", at=R, reads=(R,))
    gm = EmitProgram(_SIZES, part=rank).run(g.returns({Output(0): again}, (R,)), mesh())
    mode = static_mode()
    with mode:
        value = torch.empty(4)
    inputs = forward_inputs(gm.graph)
    traced = trace_for_inductor(joint_function(gm, inputs, [], _CPU), mode, [value], [])
    traced.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    assert collectives(traced.graph) == ["all_reduce", "all_reduce_1"]


_TAKE_A_NUMBER = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.broadcast.default,
)


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]
