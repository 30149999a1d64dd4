from __future__ import annotations

import pytest
import torch

from fxdp.ir.network.raw_bytes import pack, pack_strided, strided_size, unpack, unpack_strided


def test_values_of_any_layout_are_packed() -> None:
    full = torch.arange(6.0)
    values = [
        full.view(2, 3).t(), torch.ones(()).expand(1), torch.ones(()), torch.ones(1, dtype=torch.int8),
        full[3:3], torch.tensor([1 + 2j]).conj(), full[4:].double(),
    ]  # fmt: skip
    found = unpack(pack(values), [v.shape for v in values], [v.dtype for v in values])
    for got, value in zip(found, values, strict=True):
        assert torch.equal(got, value.resolve_conj())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.int8], ids=str)
def test_strides_and_alignment_travel(dtype: torch.dtype) -> None:
    memory = torch.arange(121).to(dtype)
    base = memory[1:].view(4, 5, 6)
    expanded = memory[3:8].view(5, 1).expand(5, 7)
    for value in (base, base.transpose(0, 2), base[:, 1:4], expanded, base[2, 3, 4], base[:, :1, ::2]):
        packed = pack_strided(value)
        assert packed.numel() == strided_size(value.shape, dtype)
        found = unpack_strided(packed, value.shape, dtype)
        assert torch.equal(found, value)
        assert found.stride() == value.stride()
        assert found.data_ptr() % 64 == value.data_ptr() % 64
