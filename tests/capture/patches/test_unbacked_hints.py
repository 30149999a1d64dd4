"""Integers that Python reads of the data, where the size of the batch alone decides them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.capture.patches.unbacked_hints import HintedNumber, decided_by_size
from fxdp.torch_compat import torch_release
from tests.capturing import capture
from tests.lockstep import check


class Pooled(nn.Module):
    """torch_geometric: how many graphs there are is what the last node's number says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        of = (torch.zeros_like(edges) + torch.arange(len(x)).view(-1, 1)).flatten()
        graphs = int(of.max()) + 1
        pooled = torch.zeros(graphs, 4, dtype=x.dtype).index_add(0, of, self.fc(x).flatten(0, 1))
        return pooled.square().mean()


def test_a_number_that_follows_from_the_size_of_the_batch() -> None:
    found = check(Pooled().double(), (torch.randn(8, 3, 4).double(), torch.ones(8, 3, dtype=torch.long)))
    (number,) = found.captured.checks
    assert number.otherwise == "other number"
    assert number.location.code == "graphs = int(of.max()) + 1"


class Sized(nn.Module):
    """Mistral 3 and LLaVA-OneVision: images have the size that their row of numbers says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        made = []
        for image, size in zip(x, sizes, strict=True):
            height, width = size.tolist()
            made.append(self.fc(image)[:height, :width].flatten())
        return torch.stack(made).square().mean()


def _images(batch: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 5, 6, dtype=torch.float64), torch.tensor([size] * batch)


def test_a_number_that_each_sample_has() -> None:
    check(Sized().double(), _images(8, (3, 2)))


def test_a_batch_with_another_number_is_refused() -> None:
    model = Sized().double()
    compiled = fxdp.compile(model, {"dp": 1}, backend="eager")
    x, sizes = _images(4, (3, 2))
    torch.testing.assert_close(compiled(x, sizes), model(x, sizes))
    with pytest.raises(fxdp.InputError, match=r"another one in this batch.*\n.*size.tolist\(\)"):
        compiled(*_images(4, (4, 2)))


def test_samples_with_numbers_of_their_own_are_refused() -> None:
    x, sizes = _images(8, (3, 2))
    sizes[1, 0] = 1
    with pytest.raises(fxdp.CaptureError, match=r"height, width = size.tolist\(\)") as caught:
        capture(Sized().double(), (x, sizes), {})
    # torch 2.11 and 2.15 cut by numbers that they do not know, and stop at the batch, the length of the loop
    assert ("data-dependent" in str(caught.value)) == (torch_release() not in ("2.11", "2.15"))


def test_what_the_size_decides() -> None:
    a, b, c = ("a.py", 1), ("b.py", 2), ("c.py", 3)
    sizes = (3, 4, 7, 11)
    runs = {
        n: [HintedNumber(a, 2 * n), *[HintedNumber(b, [3, 2])] * n, HintedNumber(c, n % 2)] for n in sizes
    }
    assert {read.place for read in decided_by_size(runs)[4]} == {a, b}
    assert not decided_by_size({n: [HintedNumber(c, n % 2)] for n in sizes})


def test_a_list_of_as_many_numbers_as_samples() -> None:
    a, b = ("a.py", 1), ("b.py", 2)
    runs = {n: [HintedNumber(a, [16] * n), HintedNumber(b, [*range(n)])] for n in (3, 4, 7, 11)}
    assert {read.place for read in decided_by_size(runs)[4]} == {a}


class Keyed(nn.Module):
    """Lumina 2 and WanAnimate 2: lengths in a set, and as a key."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        alike = len({*lengths.tolist()}) == 1
        return self.fc(x[:, : lengths[0].item()]).square().mean() if alike else self.fc(x).mean()


def test_a_number_in_a_set() -> None:
    x = torch.randn(8, 5, 4, dtype=torch.float64)
    check(Keyed().double(), (x, torch.full((8,), 3)))
    with pytest.raises(fxdp.CaptureError, match=r"lengths.tolist\(\).*data-dependent control flow"):
        capture(Keyed().double(), (x, torch.arange(8)), {})


class Masked(nn.Module):
    """VideoMAE: of each sample as many patches are masked, and attention asks how many these are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        seen = self.fc(x)[~masked].reshape(x.size(0), -1, 4)
        if seen.size(1) > 2:
            seen = seen.softmax(1)
        return (seen.mean(1) - x[masked].reshape(x.size(0), -1, 4).mean(1)).square().mean()


def test_as_many_rows_as_a_mask_selects_of_each_sample() -> None:
    masked = torch.stack([torch.randperm(5) < 2 for _ in range(8)])
    found = check(Masked().double(), (torch.randn(8, 5, 4, dtype=torch.float64), masked))
    assert [check.otherwise for check in found.captured.checks] == ["other number"] * 2
