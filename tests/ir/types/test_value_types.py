from __future__ import annotations

import pytest
import sympy
import torch

from fxdp.ir.types.placements import R, S
from fxdp.ir.types.sizes import LOCAL, B
from fxdp.ir.types.value_types import ScalarType, TensorType, local_shape, type_bytes

S0 = sympy.Symbol("s0", integer=True, positive=True)
WIDE = TensorType(torch.float64, (B, 3, S0))


def test_bytes_at_typical_sizes() -> None:
    assert type_bytes(TensorType(torch.float16, ())) == 2
    assert type_bytes(WIDE) == 8 * 64 * 3 * 32
    assert type_bytes(WIDE, batch=2) == 8 * 2 * 3 * 32


def test_bytes_at_given_sizes() -> None:
    assert type_bytes(WIDE, {"B": 5, "s0": 2}) == 8 * 5 * 3 * 2
    assert type_bytes(WIDE, {"B": 5}, unknown=5) == 8 * 5 * 3 * 5
    with pytest.raises(KeyError, match="s0"):
        type_bytes(WIDE, {"B": 5})


def test_tuples_sum_up_and_what_is_no_tensor_has_no_bytes() -> None:
    assert type_bytes((WIDE, None, ScalarType(B), TensorType(torch.bool, (B,)))) == 8 * 64 * 3 * 32 + 64
    assert type_bytes(None) == type_bytes(ScalarType(B)) == 0


def test_local_shape() -> None:
    assert local_shape(WIDE, R) == (B, 3, S0)
    assert local_shape(WIDE, S(0)) == (LOCAL, 3, S0)
