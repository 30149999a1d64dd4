"""Where a batch enters: loaders of different lengths, batch dims, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxdp
from fxdp import Rows
from tests.rank_pool import RankPool


def test_tensors_without_a_batch_dim_stay_plain() -> None:
    x, (weights, name) = fxdp.global_batch((torch.ones(3, 2), (torch.ones(4), "a")), batch_dims=(0, None))
    assert isinstance(x, fxdp.GlobalTensor)
    assert type(weights) is Tensor
    assert name == "a"
    across = fxdp.global_batch(torch.ones(2, 3), batch_dims=1)
    assert across.placements == (fxdp.S(1),)


def test_batches_of_two_sizes_are_refused() -> None:
    with pytest.raises(fxdp.InputError, match=r"batches of \[3, 4\].*batch_dims="):
        fxdp.global_batch((torch.ones(3, 2), torch.ones(4)))


class _Loader:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.note = sizes, "kept"

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Any:
        for i, size in enumerate(self.sizes):
            yield {"x": torch.full((size, 2), float(i + 1)), "name": i}


def _loaded(sizes: dict[int, tuple[int, ...]]) -> Any:
    loader = fxdp.shard(_Loader(sizes[dist.get_rank()]))
    found = [(tuple(b["x"].shape), b["x"].local_sizes, b["x"].sum().item()) for b in loader]
    return len(loader), loader.note, found


def test_a_loader_that_ends_first_goes_on_with_empty_parts(ranks: RankPool) -> None:
    found = ranks.run(2, _loaded, {0: (2, 1), 1: (1, 3, 2)})
    expected = [((3, 2), (2, 1), 6.0), ((4, 2), (1, 3), 16.0), ((2, 2), (0, 2), 12.0)]
    assert found == [(2, "kept", expected), (3, "kept", expected)]


class _Ragged:
    """Packed documents and a list of notes; rank 1 has one batch less, rank 0 no image in the first."""

    def __iter__(self) -> Any:
        rank = dist.get_rank()
        for number in range(2 - rank):
            sizes = [2, 1 + rank]
            batch: dict[str, Any] = {
                "words": torch.arange(sum(sizes)) + 10 * rank,
                "bounds": torch.tensor([0, *sizes]).cumsum(0),
                "notes": [{"rank": rank, "boxes": torch.full((rank + 1, 2), float(number))}] * (1 + rank),
            }
            if rank or number:
                batch["images"] = torch.full((1, 2), float(rank))
            yield batch


def _loaded_ragged() -> list[Any]:
    dims = {
        "words": Rows("words"), "bounds": Rows("documents", bounds="words"),
        "notes": Rows("notes", dim=None), "images": Rows("images"),
    }  # fmt: skip
    return [
        (b["words"].tolist(), b["bounds"].tolist(), b["images"].tolist(), b["images"].local_sizes,
         [(note["rank"], *note["boxes"].shape) for note in b["notes"]])
        for b in fxdp.shard(_Ragged(), batch_dims=dims)
    ]  # fmt: skip


def test_ragged_batches_of_loaders_of_different_lengths(ranks: RankPool) -> None:
    first = (
        [0, 1, 2, 10, 11, 12, 13], [0, 2, 3, 5, 7], [[1.0, 1.0]], (0, 1), [(0, 1, 2), (1, 2, 2), (1, 2, 2)]
    )  # fmt: skip
    second = ([0, 1, 2], [0, 2, 3], [[0.0, 0.0]], (1, 0), [(0, 1, 2)])
    assert ranks.run(2, _loaded_ragged) == [[first, second]] * 2


def _refusals() -> list[str]:
    rank, words = dist.get_rank(), []

    def refused(function: Any) -> None:
        try:
            function()
        except fxdp.FxdpError as error:
            words.append(f"{type(error).__name__}: {error}")
        else:
            words.append("")

    refused(lambda: list(fxdp.shard([] if rank else [torch.ones(2, 2)])))
    refused(lambda: fxdp.global_batch(torch.ones(2, 2 + rank)))
    refused(lambda: fxdp.global_batch(torch.ones(2, 2) if rank else (torch.ones(2), torch.ones(3))))
    torch.manual_seed(rank)
    x = fxdp.global_batch(torch.ones(2, 2))
    refused(lambda: torch.randn_like(x))
    torch.manual_seed(0)
    x = fxdp.global_batch(torch.ones(2, 2))
    refused(lambda: torch.randn_like(x))
    return words


def test_what_does_not_fit_is_told_on_every_rank(ranks: RankPool) -> None:
    for words in ranks.run(2, _refusals):
        assert "loaders of ranks [1] have no batch" in words[0]
        assert "ranks [1] pass other tensors than rank 0" in words[1]
        assert "batches of [2, 3]" in words[2]
        assert "torch.manual_seed with one number" in words[3]
        assert words[4] == ""
