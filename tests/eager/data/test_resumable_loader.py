"""A run that is killed and resumed on other ranks sees the samples of one device, each with its own draws."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fxdp
from tests.rank_pool import RankPool

SAMPLES, BATCH, EPOCHS = 11, 4, 3


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with their index, and with draws of all three generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *drawn], dtype=torch.float64), torch.tensor(index % 3)


class Stream(IterableDataset[Tensor]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.samples):
            yield torch.tensor([index, random.random(), float(torch.rand(()))])


class Stateful:
    """A loader that keeps its own position, as torchdata's does."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < len(self):
            self.at += 1
            yield torch.full((BATCH, 1), self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A collator that needs the whole batch, and draws."""
    values = torch.stack([value for value, _ in samples])
    return values - values.mean(0) + torch.rand(()), torch.stack([label for _, label in samples])


def _loader(kind: str, workers: int = 0) -> fxdp.ResumableLoader:
    if kind == "stateful":
        return fxdp.data_loader(Stateful())
    if kind == "iterable":
        return fxdp.data_loader(Stream(), BATCH, seed=5, num_workers=workers)
    collate = {"collate_fn": _padded} if kind == "collated" else {}
    return fxdp.data_loader(Noisy(), BATCH, shuffle=True, seed=5, num_workers=workers, **collate)


def _whole(batch: Any) -> Any:
    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    return first.full().tolist()


def _run(kind: str, state: dict[str, Any] | None, stop: int, workers: int = 0) -> tuple[list[Any], Any]:
    """The next batches, at most `stop`, and the position after the last one."""
    loader, found = _loader(kind, workers), []
    if state is not None:
        loader.load_state_dict(state)
    torch.manual_seed(len(found))
    random.seed(3)
    drawn = random.getstate(), torch.get_rng_state()
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            found.append(_whole(batch))
            if len(found) == stop:
                assert random.getstate() == drawn[0], "the run's own draws are not the data's"
                assert torch.equal(torch.get_rng_state(), drawn[1])
                return found, loader.state_dict()
    return found, None


def _resumed(kind: str, state: Any, stop: int, workers: int) -> tuple[list[Any], Any]:
    return _run(kind, state, stop, workers)


@pytest.mark.parametrize("kind", ["map-style", "collated", "iterable", "stateful"])
def test_killed_and_resumed_on_other_ranks(ranks: RankPool, kind: str) -> None:
    expected, _ = _run(kind, None, 100)
    assert len(expected) == EPOCHS * 3
    found, state, turns = [], None, random.Random(kind)
    workers = 2 if kind == "map-style" else 0
    while len(found) < len(expected):
        world, stop = turns.choice([1, 2, 3]), turns.randint(1, 4)
        seen = ranks.run(world, _resumed, kind, state, stop, workers if len(found) < 3 else 0)
        assert all(one == seen[0] for one in seen)
        found += seen[0][0]
        state = seen[0][1]
    assert found == expected


def test_workers_change_nothing() -> None:
    assert _run("collated", None, 4, workers=2)[0] == _run("collated", None, 4)[0]


def test_epochs_have_orders_of_their_own_and_each_sample_once() -> None:
    found, _ = _run("map-style", None, 100)
    epochs = [[row[0] for batch in found[i : i + 3] for row in batch] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_that_is_left_early_is_over() -> None:
    loader = _loader("map-style")
    next(iter(loader))
    second = [_whole(batch) for batch in loader]
    assert second == _run("map-style", None, 100)[0][3:6]
    assert loader.epoch == 2


def _trained(folder: Path, first: bool, strategy: str, stop: int) -> tuple[list[float], bool]:
    """Losses until `stop` steps in all, saved there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    compiled = fxdp.compile(model, strategy=strategy, loss_fn=F.cross_entropy, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.1)
    loader = fxdp.data_loader(Noisy(), BATCH, shuffle=True, local=True)
    step = 0 if first else fxdp.load(folder, compiled, optimizer, data=loader)
    losses: list[float] = []
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            loss = compiled(x, target=y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step + len(losses) == stop:
                fxdp.save(folder, compiled, optimizer, step=stop, data=loader)
                return losses, False
    return losses, True


def test_losses_of_a_run_that_goes_on_elsewhere(ranks: RankPool, tmp_path: Path) -> None:
    expected, over = _trained(tmp_path / "whole", True, "replicate", 100)
    assert over
    found: list[float] = []
    for world, strategy, stop in (
        (2, "shard", 2),
        (1, "replicate", 4),
        (3, "replicate", 7),
        (2, "shard", 100),
    ):
        seen = ranks.run(world, _trained, tmp_path / "run", not found, strategy, stop)
        found += seen[0][0]
    assert found == pytest.approx(expected, rel=1e-9)


def test_data_of_another_order_is_refused_whole(tmp_path: Path) -> None:
    loader = _loader("map-style")
    next(iter(loader))
    other = fxdp.data_loader(Noisy(12), BATCH, shuffle=True, seed=6)
    with pytest.raises(fxdp.InputError, match=r"(?s)seed is 6 here, 5 in the state.*samples is 12 here, 11"):
        other.load_state_dict(loader.state_dict())
    compiled = fxdp.compile(nn.Linear(4, 3), backend="eager")
    before = compiled.module.weight.clone()  # type: ignore[union-attr]
    fxdp.save(tmp_path / "a", fxdp.compile(nn.Linear(4, 3), backend="eager"), data=loader)
    with pytest.raises(fxdp.InputError, match="seed is 6 here"):
        fxdp.load(tmp_path / "a", compiled, data=other)
    fxdp.save(tmp_path / "b", compiled)
    with pytest.raises(fxdp.InputError, match="has no position of data"):
        fxdp.load(tmp_path / "b", compiled, data=loader)
    assert torch.equal(before, compiled.module.weight)  # type: ignore[arg-type]
    assert other.state_dict()["given"] == 0
    with pytest.raises(fxdp.InputError, match="num_workers is 0 here, 2 in the state"):
        _loader("iterable").load_state_dict(_loader("iterable", workers=2).state_dict())


def test_a_stream_that_became_shorter_than_the_position_is_refused() -> None:
    """One that ends where the position is begins its next epoch."""
    state = fxdp.data_loader(Stream(), BATCH).state_dict() | {"given": 2}
    for samples, batches in ((8, 0), (11, 1)):
        loader = fxdp.data_loader(Stream(samples), BATCH)
        loader.load_state_dict(state)
        assert (len(list(loader)), loader.epoch) == (batches, 1)
    loader = fxdp.data_loader(Stream(4), BATCH)
    loader.load_state_dict(state)
    with pytest.raises(fxdp.InputError, match="after batch 1 of epoch 0, the position is behind batch 2"):
        next(iter(loader))


def _of_other_lengths() -> list[str]:
    words = []
    try:
        for _ in fxdp.data_loader(Stream(SAMPLES - 4 * dist.get_rank()), BATCH):
            pass
    except fxdp.InputError as error:
        words.append(str(error))
    return words


def test_sequences_of_other_lengths_are_refused_on_all_ranks(ranks: RankPool) -> None:
    assert [w[0][:29] for w in ranks.run(2, _of_other_lengths)] == ["the data of ranks [1] ended, "] * 2


def _of_other_data() -> list[str]:
    words = []
    try:
        next(iter(fxdp.data_loader(Noisy(SAMPLES + dist.get_rank()), BATCH, local=True)))
    except fxdp.InputError as error:
        words.append(str(error).splitlines()[-1].strip())
    return words


def test_a_data_set_of_another_length_on_one_rank_is_refused_on_all(ranks: RankPool) -> None:
    assert ranks.run(2, _of_other_data) == [["samples is [11, 12] by rank"]] * 2


def test_its_length_counts_batches() -> None:
    assert [len(_loader(kind)) for kind in ("map-style", "stateful")] == [3, 3]
    assert len(fxdp.data_loader(Noisy(), BATCH, drop_last=True)) == 2

    class Known(Stream):
        def __len__(self) -> int:
            return self.samples

    assert len(fxdp.data_loader(Known(), BATCH)) == 3


class Deadly(Noisy):
    """Its sixth sample kills the process that loads it; its seventh raises."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 6:
            raise ConnectionError("no such host")
        return super().__getitem__(index)


def test_a_dead_worker_is_told_by_its_batch_and_an_error_is_its_own() -> None:
    with pytest.raises(fxdp.InputError, match=r"died, and batch \d of epoch 0 did not come.*num_workers=0"):
        list(fxdp.data_loader(Deadly(), BATCH, num_workers=1))
    later = fxdp.data_loader(Deadly(), 1, num_workers=1)
    later.load_state_dict(later.state_dict() | {"given": 6})
    with pytest.raises(ConnectionError, match="no such host"):
        next(iter(later))


class Shared(Stream):
    """Each worker has a share."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.samples, step):
            yield torch.tensor(index)


def _split_already(worker: int) -> None:
    """What says that the iterable is shared out in a way of its own."""


def test_workers_that_do_not_share_an_iterable_are_refused() -> None:
    """On one device, too: torch would give each sample once for each worker."""
    with pytest.raises(fxdp.InputError, match=r"Stream gives each worker all.*num_workers=0 or 1"):
        next(iter(fxdp.data_loader(Stream(4), 2, num_workers=2)))
    shared = fxdp.data_loader(Shared(), 2, num_workers=2)
    assert sorted(index for batch in shared for index in batch.tolist()) == list(range(SAMPLES))
    told = fxdp.data_loader(Stream(4), 4, num_workers=2, worker_init_fn=_split_already)
    assert len(list(told)) == 2


class Boundless:
    def __getitem__(self, index: int) -> int:
        return index


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(fxdp.InputError, match=r"sampler=.*batch_size=None.*Boundless has no __len__"):
        fxdp.data_loader(Boundless(), sampler=[1])
    with pytest.raises(
        fxdp.InputError, match=r"batch_size='4'; .*block=1.5; .*seed='a'; expected an integer"
    ):
        fxdp.data_loader([1, 2], "4", block=1.5, seed="a")
    with pytest.raises(fxdp.InputError, match=r"batch_size= is the wrapped loader's own"):
        fxdp.data_loader(Stateful(), 4)
    with pytest.raises(fxdp.InputError, match="generator has no __getitem__; expected one, or an"):
        fxdp.data_loader((number for number in range(3)), 2)
    with pytest.raises(fxdp.InputError, match="shuffle=True of an iterable"):
        fxdp.data_loader(Stream(), 4, shuffle=True)
    wrong = fxdp.data_loader([torch.ones(2), torch.ones(3)], 2, collate_fn=torch.cat)
    with pytest.raises(fxdp.InputError, match=r"a batch of 2 samples has a tensor \[5\]"):
        next(iter(wrong))
