"""What a rank sees of its rows; what all ranks do then, `tests/exactness/test_kept_whole.py` tests."""

from __future__ import annotations

import pytest
import torch

from fxdp.runtime.unsharded_parameters import _alike

_DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.uint8]


@pytest.mark.parametrize("dtype", _DTYPES)
def test_values_are_alike_bit_by_bit(dtype: torch.dtype) -> None:
    values = torch.ones(3, 2).to(dtype)
    other = values.clone()
    assert _alike(values, other)
    other[2, 1] = 2
    assert not _alike(values, other)


def test_what_is_not_finite_is_alike_and_zeros_have_signs() -> None:
    values = torch.tensor([float("nan"), float("inf"), 0.0])
    assert _alike(values, values.clone())
    assert not _alike(values, torch.tensor([float("nan"), float("inf"), -0.0]))
    assert _alike(values[:0], values[3:])
