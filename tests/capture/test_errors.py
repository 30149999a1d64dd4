"""What cannot be captured is refused, with the user's line and a remedy."""

from __future__ import annotations

import builtins
import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fxdp.errors import CaptureError, InputError
from tests.capturing import capture

from .oracle import check


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)


class Branch(Base):
    def forward(self, x):
        if x.sum() > 0:
            return self.fc(x)
        return -self.fc(x)


class Item(Base):
    def forward(self, x):
        y = self.fc(x)
        return y.sum() * math.sqrt(y.max().item())


class Returned(Base):
    def forward(self, x):
        return self.fc(x).sum(), x.sum().item()


class Loop(Base):
    def forward(self, x):
        return sum(i * self.fc(row).sum() for i, row in enumerate(x))


class ChosenLoop(Base):
    def forward(self, x):
        return sum(self.fc(x[row]).sum() for row in x.sum(1).gt(0).nonzero())


class Lists(Base):
    def forward(self, x):
        lengths = x.gt(0).sum(1).tolist()
        return sum(self.fc(x)[i, :n].sum() for i, n in enumerate(lengths))


class ListedIndex(Base):
    def forward(self, x):
        rows, columns = zip(*x.gt(0).long()[:, :2], strict=True)
        return self.fc(x)[rows, columns].sum()


class TwoMasks(Base):
    def forward(self, x):
        return F.l1_loss(self.fc(x)[x[:, 0] > 0], x[x[:, 0] > 0, :3])


class Gradient(Base):
    def forward(self, x):
        x = x.requires_grad_()
        self.fc(x).sum().backward()
        return (self.fc(x) * x.grad).sum()


class Unmarked(Base):
    def forward(self, x):
        (g,) = torch.autograd.grad(self.fc(x).sum(), x, create_graph=True)
        return (g**2).sum()


class Unused(Base):
    def forward(self, x):
        other = x.clone().requires_grad_()
        g, _ = torch.autograd.grad(self.fc(x).sum(), [self.fc.weight, other], allow_unused=True)
        return (g**2).sum()


class Packed(Base):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(1, 2, batch_first=True)

    def forward(self, x):
        lengths = x.gt(0).sum(1).clamp(1)
        packed = pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].sum()


class Functional(Base):
    def forward(self, x):
        g = torch.func.grad(lambda v: self.fc(v).sum())(x)
        return (g**2).sum()


class Jacobian(Base):
    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(self.fc))(x).square().sum()


class Chunked(Base):
    def forward(self, x):
        return self.fc(x.view(2, x.shape[0] // 2, 4)).sum()


class Loose(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(3, requires_grad=True)

    def forward(self, x):
        return (self.fc(x) * self.scale).sum()


class Sized(Base):
    def forward(self, x):
        return (self.fc(x) * torch.tensor([float(i) for i in range(x.shape[0])])[:, None]).sum()


X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Branch, ["data-dependent", "if x.sum() > 0:", "torch.cond", "test_errors.py"]),
        (Item, ["data-dependent", "y.max().item()", "test_errors.py"]),
        (Returned, ["returns a Python number", "Return the tensor"]),
        (Loop, ["batch size", "sum(i * self.fc(row).sum() for i, row in enumerate(x))"]),
        (
            ChosenLoop,
            ["loops over the rows", "for row in x.sum(1).gt(0).nonzero()", "fixed number", "batched_mm"],
        ),
        (Lists, [".tolist() of a tensor of shape [4]", "lengths = x.gt(0).sum(1).tolist()"]),
        (ListedIndex, ["self.fc(x)[rows, columns]", "read one by one in C++", "torch.stack(rows)"]),
        (TwoMasks, ["F.l1_loss(", "mask once", "output[chosen]"]),
        (Gradient, ["self.fc(x).sum().backward()", "torch.autograd.grad(y, x, create_graph=True)"]),
        (Unmarked, ["does not require grad", "x.requires_grad_()", "(g,) = torch.autograd.grad("]),
        (Unused, ["gives None", "materialize_grads=True"]),
        (Packed, ["packed sequence is ragged", "padded", "self.rnn(packed)"]),
        (Functional, ["g = torch.func.grad(lambda v", "torch.func.jvp", "test_errors.py"]),
        (Jacobian, ["torch.func.jacrev(self.fc)", "torch.func.jvp"]),
        (Chunked, ["x.view(2, x.shape[0] // 2, 4)", "test_errors.py"]),
        (Loose, ["nn.Parameter"]),
        (Sized, ["constant", "depends on the batch size", "torch.tensor([float(i) for i in range("]),
    ],
)
def test_refused_with_line_and_remedy(model: type[nn.Module], words: list[str]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), (X,), {})
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda o, t: o - t, r"shape \[\w+, 3\]"),
        (lambda o, t: 3.0, "3.0"),
        (lambda o, t: (o.sum(), t), "it returned"),
        (lambda o, t: o.argmax(), "int64"),
    ],
)
def test_loss_must_be_a_scalar(loss_fn, got: str) -> None:
    with pytest.raises(CaptureError, match="scalar floating-point tensor.*" + got):
        capture(nn.Linear(4, 3), (X,), {"target": torch.zeros(4, 3)}, loss_fn=loss_fn)


def test_missing_target() -> None:
    with pytest.raises(InputError, match="target="):
        capture(nn.Linear(4, 3), (X,), {}, loss_fn=F.mse_loss)


def test_loss_with_parameters() -> None:
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(3))

        def forward(self, output, target):
            return (output - self.centers).pow(2).mean()

    with pytest.raises(CaptureError, match="centers"):
        capture(nn.Linear(4, 3), (X,), {"target": X}, loss_fn=Centers())


def test_batch_sizes_differ() -> None:
    class Two(Base):
        def forward(self, x, y):
            return (self.fc(x).sum() + y.sum()).sum()

    with pytest.raises(InputError, match=r"(?s)batch sizes differ.*x: 4.*y: 3.*ragged.*pad each sample"):
        capture(Two(), (X, torch.zeros(3, 2)), {})
    with pytest.raises(InputError, match=r"(?s)x: 4 .*y: 12 .*several rows for each .*RowsPerSample\(3\)"):
        capture(Two(), (X, torch.zeros(12, 2)), {})


def test_the_users_own_error_is_shown() -> None:
    class Wrong(Base):
        def forward(self, x):
            raise ValueError("temperature must be positive")

    with pytest.raises(CaptureError, match="temperature must be positive") as caught:
        capture(Wrong(), (X,), {})
    assert "raise ValueError" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_wrong_shapes() -> None:
    with pytest.raises(CaptureError, match=r"mat1 and mat2|shape|reduction dim"):
        capture(nn.Linear(5, 3), (X,), {})


def test_nothing_is_left_behind() -> None:
    forward, before = nn.BatchNorm1d.forward, torch.get_rng_state()
    with pytest.raises(CaptureError):
        capture(Branch(), (X,), {})
    check(nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, momentum=None)), (X,))
    assert nn.BatchNorm1d.forward is forward
    assert "len" not in globals()
    assert builtins.len is len
    assert torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


class Copied(Base):
    def forward(self, x):
        return copy.deepcopy(self.fc)(x).sum()


class Printed(Base):
    def forward(self, x):
        y = self.fc(x).sum()
        print(f"{y.item():.3f}")
        return y


class Numpy(Base):
    def forward(self, x):
        return self.fc(x).sum() * float(x.numpy().sum())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Copied, r"at \S*test_errors.py:\d+ `return copy.deepcopy\(self.fc\)\(x\).sum\(\)`: "),
        (Printed, r"at \S*test_errors.py:\d+ `print.*`: data-dependent control flow. .*torch.where"),
        (Numpy, r"at \S*test_errors.py:\d+ `return .*`: data-dependent control flow. .*torch.where"),
    ],
)
def test_what_torch_says_in_words_of_its_own_is_said_in_the_users(model: type[Base], words: str) -> None:
    with pytest.raises(CaptureError, match=words) as raised:
        capture(model(), (torch.randn(5, 4),), {})
    assert "SymFloat" not in str(raised.value)
    assert "subclasses" not in str(raised.value)


def _number(output, target):
    return F.mse_loss(output, target).item()


def test_a_loss_that_is_a_number() -> None:
    words = r"loss_fn at \S*test_errors.py:\d+ `def _number.*` must return a scalar .*the number in a tensor"
    with pytest.raises(CaptureError, match=words):
        capture(nn.Linear(4, 3), (torch.randn(5, 4),), {"target": torch.randn(5, 3)}, loss_fn=_number)
