from __future__ import annotations

import torch

from fxdp.ir.network.raw_bytes import pack, unpack


def test_values_of_any_layout_are_packed() -> None:
    full = torch.arange(6.0)
    values = [
        full.view(2, 3).t(), torch.ones(()).expand(1), torch.ones(()), torch.ones(1, dtype=torch.int8),
        full[3:3], torch.tensor([1 + 2j]).conj(), full[4:].double(),
    ]  # fmt: skip
    found = unpack(pack(values), [v.shape for v in values], [v.dtype for v in values])
    for got, value in zip(found, values, strict=True):
        assert torch.equal(got, value.resolve_conj())
