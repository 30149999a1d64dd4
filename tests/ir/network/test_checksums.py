"""Checksums tell values apart, and depend on nothing else."""

from __future__ import annotations

import pytest
import torch

from fxdp.ir.network.checksums import checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (300, 301)])
def test_another_element_is_another_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    (before,) = checksums([tensor])
    assert checksums([tensor.clone()]) == [before]
    if tensor.numel():
        tensor.view(-1)[-1] = 1
        assert checksums([tensor]) != [before]


def test_views_of_a_buffer_have_checksums() -> None:
    flat = torch.arange(20.0)
    assert checksums([flat[1:6], flat[2:].view(9, 2).t()]) == checksums(
        [flat[1:6].clone(), flat[2:].view(9, 2).t().contiguous()]
    )


def test_another_order_is_another_checksum() -> None:
    assert checksums([torch.tensor([0, 1, 2])]) != checksums([torch.tensor([1, 0, 2])])
