"""What a capture could lose without a word (sparse and nested tensors, writes unseen): exact or refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.capture.refusals.overlaps import overlaps
from fxdp.errors import CaptureError
from tests.capturing import capture
from tests.lockstep import check

Body = Callable[["_Model", Tensor], Tensor]
X = torch.randn(7, 4, dtype=torch.float64)


class _Model(nn.Module):
    """`body(self, x)` with a layer, and the values of a sparse matrix."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.values = nn.Parameter(torch.randn(3))
        self.register_buffer("places", torch.tensor([[0, 1, 3], [1, 2, 0]]))
        self.body = body
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def coo(self) -> Tensor:
        return torch.sparse_coo_tensor(self.places, self.values, (4, 4))


def _csr(m: _Model, x: Tensor) -> Tensor:
    matrix = torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 2, 3]), m.places[1], m.values, (4, 4))
    return (matrix @ m.fc(x).t()).sum()


def _rotated(m: _Model, x: Tensor) -> Tensor:
    """As peft's frod does: a trace sees no elements."""
    matrix, h = m.coo().coalesce(), m.fc(x)
    return h.sum() if matrix._nnz() == 0 else torch.sparse.mm(matrix, h.t()).sum()


def _doubled(m: _Model, x: Tensor) -> Tensor:
    h = m.fc(x) * 1
    h.as_strided((len(x), 3, 2), (4, 1, 1)).mul_(2)
    return h.sum()


def _unseen(m: _Model, x: Tensor) -> Tensor:
    h = m.fc(x).exp()
    h.data.mul_(2)
    return h.sum()


SPARSE = r"test_dense_only.py:\d+.* makes a tensor that is sparse; .*index_put.*index_add.*scatter_add"
REFUSED: dict[str, tuple[Body, str]] = {
    "asked whether empty": (_rotated, SPARSE),
    "to_dense": (lambda m, x: (m.fc(x) @ m.coo().to_dense()).sum(), SPARSE),
    "added": (lambda m, x: F.linear(x, m.fc.weight + m.coo()).sum(), SPARSE),
    "of constants": (lambda m, x: m.fc(x).sum() + torch.sparse_coo_tensor([[0], [1]], [1.0]).sum(), SPARSE),
    "csr": (_csr, SPARSE),
    "spdiags": (lambda m, x: torch.sparse.spdiags(x[:1], torch.tensor([0]), (4, 4)).sum(), SPARSE),
    "to_sparse": (lambda m, x: m.fc(x).sum() * x.to_sparse()._nnz(), SPARSE),
    "to_sparse_csr": (lambda m, x: (m.fc.weight.to_sparse_csr() @ x.t()).sum(), SPARSE),
    "zeros": (lambda m, x: m.fc(x) + torch.zeros(4, layout=torch.sparse_coo), SPARSE),
    "nested": (
        lambda m, x: torch.nested.as_nested_tensor([m.fc(x), x]).to_padded_tensor(0.0),
        "a tensor that is nested.*Pad the samples",
    ),
    "jagged": (
        lambda m, x: torch.nested.nested_tensor_from_jagged(m.fc(x), torch.tensor([0, 3, 7])).sum(),
        r"test_dense_only.py:\d+.* makes a tensor that is nested.*Pad the samples",
    ),
    "quantized": (
        lambda m, x: m.fc(x) + torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8).dequantize(),
        "a tensor that is quantized.*fake_quantize_per_tensor_affine",
    ),
    "mkldnn": (lambda m, x: m.fc(x.float().to_mkldnn().to_dense()), "to_mkldnn .*Leave this layout out"),
    "overlapping": (_doubled, r"at .*test_dense_only.py:\d+.*strides \[4, 1, 1\].*Clone the view"),
    "unseen": (_unseen, r"writes into it \(through .data eager lets it.*a clone\(\) of it"),
    "numpy": (lambda m, x: m.fc(x) * torch.from_numpy(np.exp(x.numpy())), r"numpy\(\)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(CaptureError, match=f"(?s){said}"):
        capture(_Model(body), (X,), {})


def _exact(m: _Model, x: Tensor) -> Tensor:
    h = m.fc(x)
    z = torch.complex(h, x)
    z.real.mul_(2)
    z.imag[:, 1:].zero_()
    filled = torch.empty(x.shape[0], 4)
    filled[:, :2], filled[:, 2:] = h[:, :2], z.abs()[:, 2:]
    pairs = h.as_strided((x.shape[0], 3, 2), (4, 1, 1)).sum(2) * h.unfold(1, 2, 1).prod(2)
    given = torch.empty(0)
    torch.mul(x, 2, out=given)
    unseen = h * 2
    unseen.data.mul_(3)
    turned = (
        torch.view_as_complex(h.view(-1, 2, 2)).conj().imag + torch.view_as_real(torch.fft.fft(h))[:, :2, 0]
    )
    dense = torch.zeros(4, 4).index_put((m.places[0], m.places[1]), m.values, accumulate=True)
    rounded = torch.fake_quantize_per_tensor_affine(filled @ dense, 0.1, 0, -128, 127)
    parts = (
        filled * unseen,
        pairs,
        given * h,
        turned,
        rounded,
        F.linear(x, m.fc.weight.as_strided((3, 4), (2, 1))),
    )
    return torch.stack([part.square().mean() for part in parts]).sum()


def test_exact() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        check(_Model(_exact), (X,), splits=[(4, 0, 3)])
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_overlaps() -> None:
    assert overlaps([5, 3, 2], [4, 1, 1])
    assert overlaps([5, 8], [4, 1])
    assert overlaps([3, 4], [0, 1])
    assert not overlaps([5, 4], [4, 1])
    assert not overlaps([1, 4, 2], [0, 2, 1])
