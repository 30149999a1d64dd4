"""Habits of training scripts that call `fxdp.compile` by hand under torchrun, as people write them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fxdp
from tests.captures import captured_once
from tests.rank_pool import RankPool


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def _data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(11, 3, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 2, (11,), generator=drawn))


class _Run:
    """A script's globals: model, optimizer, and this rank's uneven part of a batch."""

    def __init__(self, **options: Any) -> None:
        self.model = fxdp.compile(_net(), loss_fn=F.cross_entropy, backend="eager", **options)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        x, y = _data().tensors
        parts = [(x, y)] if dist.get_world_size() == 1 else [(x[:7], y[:7]), (x[7:], y[7:])]
        self.x, self.y = parts[dist.get_rank()]

    def step(self) -> float:
        loss = self.model(self.x, target=self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _rank_0_evaluates_and_stops(_: str) -> list[float]:
    """Rank 0 evaluates the module between steps, logs, and tells the others when to stop."""
    run, shown = _Run(), []
    for _step in range(9):
        shown.append(run.step())
        stop = torch.zeros(1)
        if dist.get_rank() == 0:
            run.model.eval()
            with torch.no_grad():
                accuracy = (run.model.module(run.x).argmax(1) == run.y).double().mean()
            run.model.train()
            stop += float(accuracy >= 0) * (len(shown) == 4)
        dist.broadcast(stop, 0)
        if stop:
            break
    return shown


def _rank_0_saves(folder: str) -> list[float]:
    """Rank 0 saves the model in each of the ways that scripts have, and copies it; training goes on."""
    run = _Run()
    shown = [run.step()]
    if dist.get_rank() == 0:
        path = Path(folder) / f"model-{dist.get_world_size()}.pt"
        torch.save(run.model, path)
        assert b"fxdp" not in path.read_bytes()
        loaded = torch.load(path, weights_only=False)
        assert type(loaded) is nn.Sequential
        torch.save(run.model.state_dict(), path)
        torch.save({"model": copy.deepcopy(run.model).state_dict(), "opt": run.optimizer.state_dict()}, path)
        loaded.load_state_dict(torch.load(path)["model"])
        torch.testing.assert_close(loaded.eval()(run.x), run.model.module.eval()(run.x), rtol=0, atol=0)
        run.model.train()
    return [*shown, run.step()]


def _samplers(_: str) -> list[int]:
    """A `DistributedSampler` repeats samples to make parts equal, or drops some: each step has a batch."""
    run, sizes = _Run(), []
    for drop_last in (False, True):
        sampler: DistributedSampler[Any] = DistributedSampler(_data(), drop_last=drop_last)
        for run.x, run.y in DataLoader(_data(), batch_size=4, sampler=sampler):
            run.step()
            sizes.append(len(run.x))
    return sizes if dist.get_world_size() > 1 else []


def _episodes(_: str) -> list[float]:
    """Each rank acts by itself, for as long as its episode takes; all learn from all episodes."""
    if dist.get_world_size() == 1:
        lengths, run = [3, 5], _Run()
    else:
        lengths, run = [3 + 2 * dist.get_rank()], _Run()
    seen = []
    for length in lengths:
        state = torch.full((1, 3), float(length), dtype=torch.float64)
        for _turn in range(length):
            run.model.eval()
            with torch.no_grad():
                action = run.model.module(state).argmax(1)
            state = state * 0.5 + action
            seen.append((state, action))
    run.model.train()
    run.x, run.y = (torch.cat(column) for column in zip(*seen, strict=True))
    return [run.step(), run.step()]


class _Text(nn.Module):
    """A language model whose positions look back at what the mask lets count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        seen = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        # a place has a number, as in a model with absolute positions
        before = seen.cumsum(1) / attention_mask.cumsum(1).clamp(min=1).unsqueeze(-1)
        scores = self.head(before + torch.arange(input_ids.size(1)).sin().unsqueeze(-1))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _collated(texts: list[Tensor], side: str) -> dict[str, Tensor]:
    """Pad texts to the longest one, as a tokenizer does."""
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    columns: dict[str, list[Tensor]] = {name: [] for name in pads}
    for text in texts:
        more = max(map(len, texts)) - len(text)
        values = {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text}
        for name, value in values.items():
            columns[name].append(F.pad(value, (more, 0) if side == "left" else (0, more), value=pads[name]))
    return {name: torch.stack(column) for name, column in columns.items()}


def _dynamic_padding(_: str) -> list[float]:
    """Each rank pads its texts to its own length, and gives no `pad=`."""
    shown = []
    texts = [torch.arange(1, n) for n in (5, 4, 8, 3, 8)]
    parts = [texts] if dist.get_world_size() == 1 else [texts[:2], texts[2:]]
    for side in ("right", "left"):
        model = fxdp.compile(_Text().double(), backend="eager")
        for _step in range(2):
            loss = model(**_collated(parts[dist.get_rank()], side))
            loss.backward()
            shown.append(loss.item())
            shown.append(model.embed.weight.grad.square().sum().item())
    return shown


def _texts_of_unknown_side() -> str:
    """One text for each rank: no mask shows on which side the collator pads."""
    model = fxdp.compile(_Text().double(), backend="eager")
    try:
        model(**_collated([torch.arange(1, 4 + dist.get_rank())], "left"))
    except fxdp.InputError as error:
        return str(error)
    return ""


def test_texts_are_not_padded_where_nothing_shows_the_side(ranks: RankPool) -> None:
    for said in ranks.run(2, _texts_of_unknown_side):
        assert "pad=" in said


_HABITS = (_dynamic_padding, _rank_0_evaluates_and_stops, _rank_0_saves, _samplers, _episodes)


def _shown(folder: str) -> dict[str, list[Any]]:
    with captured_once():
        return {habit.__name__: habit(folder) for habit in _HABITS}


@pytest.fixture(scope="module")
def shown(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """What one device showed, and each of two ranks."""
    folder = str(tmp_path_factory.mktemp("habits"))
    return [*ranks.run(1, _shown, folder), *ranks.run(2, _shown, folder)]


_LENGTHS = {"_rank_0_evaluates_and_stops": 4, "_rank_0_saves": 2, "_episodes": 2, "_dynamic_padding": 8}


@pytest.mark.parametrize("habit", list(_LENGTHS))
def test_numbers_are_those_of_one_device(shown: list[dict[str, list[Any]]], habit: str) -> None:
    one, *ranks = (found[habit] for found in shown)
    assert len(one) == _LENGTHS[habit]
    for found in ranks:
        assert found == pytest.approx(one, rel=1e-12, abs=0)


def test_samplers_with_and_without_the_last_samples(shown: list[dict[str, list[Any]]]) -> None:
    assert [found["_samplers"] for found in shown[1:]] == [[4, 2, 4, 1]] * 2


def _resumed(folder: str) -> dict[tuple[str, str, str], tuple[list[float], int, int]]:
    """A scheduler may be made before or after loading, or be new; hooks are called once for each step."""
    found = {}
    with captured_once():
        for strategy in ("replicate", "shard"):
            for saved in ("with", "without"):
                run, at = _Run(strategy=strategy), f"{folder}/{strategy}-{saved}-{dist.get_world_size()}"
                if saved == "with":
                    StepLR(run.optimizer, 1)
                run.step()
                fxdp.save(at, run.model, run.optimizer)
                for made in ("before", "after"):
                    run, calls = _Run(strategy=strategy), []
                    run.optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
                    run.optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
                    scheduler = StepLR(run.optimizer, 1, 0.5) if made == "before" else None
                    fxdp.load(at, run.model, run.optimizer)
                    scheduler = scheduler or StepLR(run.optimizer, 1, 0.5)
                    losses = []
                    for _ in range(2):
                        losses.append(run.step())
                        scheduler.step()
                    found[strategy, saved, made] = losses, calls.count("pre"), calls.count("post")
    return found


def test_a_scheduler_is_made_before_or_after_loading(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, _resumed, str(tmp_path))
    (expected,) = {tuple(losses) for losses, *_ in found[0].values()}
    assert len(set(expected)) == 2
    for each in found:
        assert len(each) == 8
        for losses, pre, post in each.values():
            assert (tuple(losses), pre, post) == (expected, 2, 2)


def _alone(_: str = "") -> dict[str, str]:
    """`if rank == 0:` around a forward: the call is refused on all ranks, and the next one works."""
    run, said = _Run(), {}
    run.step()
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                run.model(run.x)
        run.step()
        said["evaluates"] = "no error"
    except fxdp.AgreementError as error:
        said["evaluates"] = str(error)
    run.model.module.load_state_dict(_net().state_dict())
    said["goes on"] = f"{run.step():.3f}"
    return said


def test_a_forward_of_rank_0_alone_is_told_by_line(ranks: RankPool) -> None:
    for found in ranks.run(2, _alone):
        words = found["evaluates"]
        assert "rank 0 is in call 2 of Sequential (called at " in words, words
        assert ", rank 1 is in call 2 of Sequential (called at " in words
        assert words.count("test_habits.py:") == 2
        assert "calls the model itself, under torch.no_grad(): compiled.module(x)" in words
        assert float(found["goes on"]) > 0
