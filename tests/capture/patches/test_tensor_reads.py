"""`tensor.data`, and what is written where no program can have it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxdp.errors import CaptureError
from tests.capturing import capture
from tests.lockstep import check


class _Model(nn.Module):
    """`body(self, x)` with a layer, a frozen twin of it, and an average."""

    def __init__(self, body: Callable[[_Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(4))
        self.body = body
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _sorted(model: _Model, x: Tensor) -> Tensor:
    """The Lovász hinge takes its order from `.data`."""
    losses, order = model.fc(x).square().sum(1).sort(descending=True)
    share = x[order.data].sum(1).cumsum(0)
    share[1:] = share[1:] - share[:-1]
    return (losses * share).sum() / model.fc.weight.data.norm()


def _averaged(model: _Model, x: Tensor) -> Tensor:
    y = model.fc(x)
    model.average.data = 0.9 * model.average.data + 0.1 * y.data.mean(0)
    return (y - model.average).square().mean()


def _follows(model: _Model, x: Tensor) -> Tensor:
    """MoCo's second encoder."""
    for slow, fast in zip(model.slow.parameters(), model.fc.parameters(), strict=True):
        slow.data = 0.9 * slow.data + 0.1 * fast.data
    return model.fc(x).sum() + model.slow(x).sum()


def _clamps(model: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.fc.weight.clamp_(-0.1, 0.1)
    return model.fc(x).square().mean()


def _normed(model: _Model, x: Tensor) -> Tensor:
    """The rows that the batch looks up are made no longer than this."""
    rows = nn.functional.embedding(x.sum(1).long() % 4, model.fc.weight, max_norm=0.3)
    return rows.square().mean()


@pytest.mark.parametrize("body", [_sorted, _averaged, _follows, _clamps, _normed])
def test_data_is_a_detached_tensor(body: Callable[[_Model, Tensor], Tensor]) -> None:
    check(_Model(body), (torch.randn(8, 4, dtype=torch.float64),), splits=[(5, 2, 0, 1)])
    assert "data" not in vars(Tensor)


def _another_shape(model: _Model, x: Tensor) -> Tensor:
    model.average.data = x.mean()
    return model.fc(x).sum()


def _records(model: _Model, x: Tensor) -> Tensor:
    model.slow.weight.mul_(model.fc.weight)
    return model.slow(x).sum()


def _reads_text(model: _Model, x: Tensor) -> Tensor:
    return model.fc(x).sum() * len(repr(x))


def _reads_text_of_a_weight(model: _Model, x: Tensor) -> Tensor:
    return model.fc(x).sum() * ("nan" in f"{model.fc.weight}")


def _compares_text(model: _Model, x: Tensor) -> Tensor:
    return model.fc(x).sum() * (repr(x) == "tensor([])" or str(x).startswith("tensor"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (_compares_text, r"at .*test_tensor_reads.py:\d+.*: reads the text of a tensor"),
        (_reads_text, r"at .*test_tensor_reads.py:\d+.*: reads the text of a tensor"),
        (_reads_text_of_a_weight, r"at .*test_tensor_reads.py:\d+.*: reads the text of a tensor"),
        (_another_shape, r"assigns torch.float64\[\] to the data of torch.float64\[4\]"),
        (_records, r"at .*test_tensor_reads.py:\d+.*: .*parameter slow.weight in place, and gradients go"),
    ],
)
def test_refused(body: Callable[[_Model, Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(_Model(body), (torch.randn(8, 4, dtype=torch.float64),), {})


def test_a_shared_parameter_is_written_for_all_who_share_it() -> None:
    model = _Model(lambda model, x: _clamps(model, model.slow(x)) + model.slow(x).square().mean())
    model.slow.weight = model.fc.weight
    check(model, (torch.randn(8, 4, dtype=torch.float64),), splits=[(5, 2, 0, 1)])


def test_the_text_of_a_tensor_may_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def shows(model: _Model, x: Tensor) -> Tensor:
        print(repr(x), f"{x} and {model.fc.bias}")
        warnings.warn(repr(x), stacklevel=1)
        return model.fc(x).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(_Model(shows), (torch.randn(8, 4, dtype=torch.float64),), splits=[(5, 2, 0, 1)])
    assert "and" in capsys.readouterr().out


def test_functions_of_strides_take_keywords() -> None:
    def pairs(model: _Model, x: Tensor) -> Tensor:
        return torch.as_strided(input=model.fc(x).contiguous(), size=(2, 4), stride=(4, 1)).sum()

    found = capture(_Model(pairs), (torch.randn(8, 4, dtype=torch.float64),), {})
    assert [(read.how, read.offset) for read in found.layout_reads] == [("as_strided", False)]
