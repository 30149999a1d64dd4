"""Models whose code reads how tensors lie in memory: refused where a program's inputs lie otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.errors import InputError
from tests.capturing import capture

ROWS = torch.arange(80, dtype=torch.float64).view(20, 4)


class _Model(nn.Module):
    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4, dtype=torch.float64), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc, x)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


REFUSED: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], Tensor]] = {
    "transposed": (lambda fc, x: fc(x.as_strided((x.shape[0], 4), (1, 5))), ROWS[:5].view(4, 5).t()),
    "function": (lambda fc, x: fc(torch.as_strided(x, (len(x), 4), (1, 5))), ROWS[:5].view(4, 5).t()),
    "derived": (lambda fc, x: fc((x * 2).as_strided((x.shape[0], 4), (4, 1))), ROWS[:5].view(4, 5).t()),
    "slice": (lambda fc, x: fc(x.as_strided((x.shape[0], 4), (4, 1))), ROWS.view(10, 8)[:, :4]),
    "storage": (lambda fc, x: fc(x.as_strided((x.shape[0], 4), (4, 1), 0)), ROWS[5:8]),
    "offset": (lambda fc, x: fc(x) * x.storage_offset(), ROWS[5:8]),
    "stride": (lambda fc, x: fc(x) * x.stride(0), ROWS.view(10, 8)[:, :4]),
    "contiguous": (lambda fc, x: fc(x) if x.is_contiguous() else x, ROWS.view(10, 8)[:, :4]),
    "view": (lambda fc, x: fc(x.view(-1)[:4]), ROWS.view(10, 8)[:, :4]),
    "only_copies": (lambda fc, x: fc(_contiguous(x)), ROWS.view(4, 20)[:, :5].t()),
    "embedded": (
        lambda fc, x: F.embedding(x.long() % 4, fc.weight).as_strided((x.shape[0], 2, 4), (16, 4, 1)),
        ROWS.view(10, 8)[:, 1:5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_strides_are_refused_with_line_and_remedy(name: str) -> None:
    body, x = REFUSED[name]
    said = r"test_input_layouts.py:\d+ `.*: the model's code reads how its .*Pass x.clone\(memory_format="
    with pytest.raises(InputError, match=said):
        fxdp.plan(_Model(body), (x,), mesh={"dp": 2})
    fxdp.plan(_Model(body), (x.clone(memory_format=torch.contiguous_format),), mesh={"dp": 2})


ALIKE: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], Tensor]] = {
    "another_start": (lambda fc, x: fc(x.as_strided((x.shape[0], 4), (4, 1))), ROWS[5:8]),
    "a_parameter": (lambda fc, x: fc(x) * fc.weight.stride(0), ROWS.view(10, 8)[:, :4]),
    "no_read": (lambda fc, x: fc(x.reshape(-1, 4)), ROWS.view(10, 8)[:, :4]),
    "same_view": (lambda fc, x: fc(x.view(-1, x.size(-1))), ROWS.view(10, 8)[:, :4]),
    "one_row": (lambda fc, x: fc(x) * x.stride(1), ROWS.view(10, 8)[:1, :4]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_the_code_reads_alike_is_taken(name: str) -> None:
    body, x = ALIKE[name]
    fxdp.verify(_Model(body), (x,), mesh={"dp": 2}, splits=[len(x) - 1, 1]).raise_if_wrong()
    reads = capture(_Model(body), (x,), {}).layout_reads
    assert bool(reads) is (name not in ("a_parameter", "no_read", "same_view"))


def test_each_call_is_looked_at() -> None:
    strided = fxdp.compile(_Model(REFUSED["stride"][0]), backend="eager")
    strided(ROWS)
    with pytest.raises(InputError, match=r"reads how its inputs lie in memory \(stride\), and these"):
        strided(ROWS.view(10, 8)[:, :4])
    strided(ROWS)


def _viewed(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.view(-1), target.view(-1))


def test_of_several_inputs_the_one_that_is_viewed_counts() -> None:
    model = fxdp.compile(_Model(lambda fc, x: fc(x)), loss_fn=_viewed, backend="eager")
    model(ROWS.view(10, 8)[:, :4], target=ROWS[:10])
    with pytest.raises(InputError, match=r"memory: target \(strides \[8, 1\], offset 0\)\. Pass"):
        model(ROWS[:10], target=ROWS.view(10, 8)[:, :4])
