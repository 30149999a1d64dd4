"""Ranks whose sequences differ in length: padded to the longest, or refused on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxdp
from fxdp.errors import FxdpError, InputError
from fxdp.module.calls.padding import padded, spread_pad
from fxdp.module.calls.reader import CallReader
from tests.rank_pool import RankPool

PAD = ((0, -100), {})


class Tokens(nn.Module):
    """A causal language model that takes 0 for a gap; positions have a table of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 6), nn.Embedding(64, 6)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.mix(x.cumsum(1)).relu()
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def _batch(step: int, sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(step)
    ids = [torch.randint(1, 11, size, generator=random) for size in sizes]
    return [(x, x.roll(-1, 1)) for x in ids]


def _full(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    longest = max(x.shape[1] for x, _ in parts if len(x))
    ids = [F.pad(x[:, :longest], (0, longest - min(longest, x.shape[1]))) for x, _ in parts]
    labels = [F.pad(y[:, :longest], (0, longest - min(longest, y.shape[1])), value=-100) for _, y in parts]
    return torch.cat(ids), torch.cat(labels)


def _steps(sizes: list[list[tuple[int, int]]]) -> tuple[float, int]:
    torch.manual_seed(0)
    model, twin = Tokens().double(), Tokens().double()
    twin.load_state_dict(model.state_dict())
    compiled = fxdp.compile(model, pad=PAD, backend="eager")
    worst = 0.0
    for step, own in enumerate(sizes):
        parts = _batch(step, own)
        loss, logits = compiled(*parts[dist.get_rank()])
        expected, _ = twin(*_full(parts))
        assert logits.shape[1] == _full(parts)[0].shape[1], "outputs have the common length"
        model.zero_grad()
        twin.zero_grad()
        loss.backward()
        expected.backward()
        worst = max(worst, abs(float((loss - expected).detach())))
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            worst = max(worst, float((a.grad - b.grad).abs().max()))
    return worst, compiled._programs.compiled


def test_32_lengths_on_each_rank_take_two_compilations(ranks: RankPool) -> None:
    """Other lengths on each rank at each step, ranks without samples among them."""
    sizes = [[(2 + step % 3, 3 + step), (step % 2, 34 - step)] for step in range(32)]
    for worst, compiled in ranks.run(2, _steps, sizes):
        assert worst <= 1e-9
        assert compiled <= 2


def _refused() -> dict[str, str]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    found = {}
    for name, pad in (("none", None), ("ids", ((0, None), {})), ("misfit", (0, 1, 2))):
        compiled = fxdp.compile(Tokens(), pad=pad, backend="eager")
        parts = _batch(0, [(2, 3), (2, 5)])
        try:
            compiled(*parts[rank])
        except FxdpError as error:
            found[name] = f"{type(error).__name__}: {error}"
        empty = _batch(0, [(2, 3), (0, 5)])
        if name == "none":
            found["empty"] = str(compiled(*empty[rank])[1].shape)
    return found


def test_without_a_pad_value_all_ranks_refuse_and_go_on(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(2, _refused)):
        assert found["none"].startswith("InputError: the ranks' inputs differ in sizes other than the batch")
        assert "ids has sizes (without the batch) [3] on rank 0, [5] on rank 1" in found["none"]
        assert "labels has" in found["none"]
        assert "pad=" in found["none"]
        assert "ids has" not in found["ids"]
        assert "labels has" in found["ids"]
        assert "pad is (0, 1, 2), which is no prefix" in found["misfit"]
        assert found["empty"] == f"torch.Size([{2 - 2 * rank}, 3, 11])", "no samples, no length"


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (None, [None, None, None]),
        (7, [7, 7, 7]),
        (((1, 2), {"mask": 0}), [1, 2, 0]),
        (((1, None), {}), [1, None, None]),
        ((None, {"mask": 0.5}), [None, None, 0.5]),
    ],
)
def test_pad_values_of_inputs(pad: Any, expected: list[float | None]) -> None:
    x = torch.ones(2, 3)
    assert spread_pad(pad, (x, x), {"mask": x}) == expected


@pytest.mark.parametrize("pad", [(1, 2, 3), ((1,), {}), (None, {"other": 1}), "zero"])
def test_pad_values_that_fit_no_input(pad: Any) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(InputError, match=r"pad.* (is no prefix of|names \['other'\], but) the inputs there"):
        spread_pad(pad, (x, x), {"mask": x})


def test_padding_grows_ends_and_lets_gradients_back() -> None:
    reader = CallReader(nn.Linear(1, 1), ((1, 0), {"table": None}), "cpu")
    x, y = torch.ones(2, 3, 4, requires_grad=True), torch.ones(3, 0)
    kwargs = {"table": torch.ones(5)}
    call = reader.read((x, y), kwargs)
    (grown, other), rest = padded(call.inputs, ((4, 6), (2,), (5,)), (9.0, 0.5, None))
    assert grown.shape == (4, 3, 6)
    assert torch.equal(grown[:2, :, :4], torch.ones(2, 3, 4))
    assert bool((grown[2:] == 9).all() and (grown[:, :, 4:] == 9).all())
    assert torch.equal(other, torch.full((3, 2), 0.5))
    assert rest["table"] is kwargs["table"]
    grown.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
