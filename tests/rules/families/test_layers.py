"""The alternatives of fused cells, which run on CUDA only."""

from __future__ import annotations

import torch

from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.registry import Op, Operand, registry
from tests.rules.harness import spelled

aten = torch.ops.aten
Shape = tuple[Dim, ...]
GATES: Shape = (B, 12)
STATE: Shape = (B, 3)
BIAS: Shape = (12,)


def alternatives(
    target: torch._ops.OpOverload, inputs: list[Shape | None], outputs: list[Shape | None]
) -> list[str]:
    operands: list[Operand] = []
    args: list[Operand | bool | None] = []
    for shape in inputs:
        if shape is not None:
            operands.append(Operand(len(operands), TensorType(torch.float32, shape)))
        args.append(operands[-1] if shape is not None else None)
    if "backward" in target._schema.name:
        args.append(True)
    types = tuple(None if s is None else TensorType(torch.float32, s) for s in outputs)
    return [spelled(a) for a in registry[target].rule(Op(target, tuple(args), (), tuple(operands), types))]


def test_lstm_cell() -> None:
    found = alternatives(
        aten._thnn_fused_lstm_cell.default, [GATES, GATES, STATE, BIAS, BIAS], [STATE, STATE, GATES]
    )
    assert found == ["S(0), S(0), S(0), R, R -> S(0), S(0), S(0)"]
    backward = aten._thnn_fused_lstm_cell_backward_impl.default
    found = alternatives(backward, [STATE, None, STATE, STATE, GATES], [GATES, STATE, BIAS])
    assert found == ["S(0), S(0), S(0), S(0) -> S(0), S(0), P(sum)"]


def test_gru_cell() -> None:
    found = alternatives(aten._thnn_fused_gru_cell.default, [GATES, GATES, STATE, BIAS, BIAS], [STATE, GATES])
    assert found == ["S(0), S(0), S(0), R, R -> S(0), S(0)"]
    backward = aten._thnn_fused_gru_cell_backward.default
    found = alternatives(backward, [STATE, GATES], [GATES, GATES, STATE, BIAS, BIAS])
    assert found == ["S(0), S(0) -> S(0), S(0), S(0), P(sum), P(sum)"]
