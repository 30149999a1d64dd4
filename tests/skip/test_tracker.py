"""Trackers: one per thread, and the one that hides in portals what leaves its partition."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxdp.skip import (
    SkipLayout,
    SkipTracker,
    SkipTrackerThroughPortals,
    SkipTrackerThroughPotals,
    current_skip_tracker,
    inspect_skip_layout,
    pop,
    skippable,
    stash,
    use_skip_tracker,
)
from fxdp.skip.batch import Batch, lane_of
from fxdp.skip.tracker import enable_checkpointing, enable_recomputing

from .modules import Pop, Stash

ACROSS = SkipLayout(2, {(None, "test"): (0, 1), (None, "own"): (0, 0)})


def test_each_thread_has_its_own() -> None:
    found: list[SkipTracker] = []
    thread = threading.Thread(target=lambda: found.append(current_skip_tracker()))
    thread.start()
    thread.join()
    assert type(found[0]) is SkipTracker
    assert found[0] is not current_skip_tracker()
    assert current_skip_tracker() is current_skip_tracker()


def test_another_one_for_a_while() -> None:
    before, other = current_skip_tracker(), SkipTracker()

    def fails() -> None:
        with use_skip_tracker(other):
            assert current_skip_tracker() is other
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert current_skip_tracker() is before


def test_the_plain_one_does_not_copy() -> None:
    tracker = SkipTracker()
    tracker.save(Batch(torch.ones(1)), None, "test", torch.ones(1))
    with pytest.raises(TypeError, match=r"^copy is not supported for non-portal skip tensors$"):
        tracker.copy(Batch(torch.ones(1)), None, None, None, "test")
    with pytest.raises(TypeError, match="non-portal"):
        SkipTrackerThroughPortals(ACROSS).copy(Batch(torch.ones(1)), None, None, None, "own")


def test_the_name_in_torchgpipe() -> None:
    assert SkipTrackerThroughPotals is SkipTrackerThroughPortals


def test_only_what_leaves_its_partition_takes_a_portal() -> None:
    tracker = SkipTrackerThroughPortals(ACROSS)
    batch = Batch(torch.ones(1))
    tracker.save(batch, None, "test", torch.ones(1))
    tracker.save(batch, None, "own", torch.ones(1))
    assert list(tracker.portals) == [(None, "test")]
    assert list(tracker.tensors) == [(None, "own")]


def test_none_takes_no_portal() -> None:
    tracker = SkipTrackerThroughPortals(ACROSS)
    batch = Batch(torch.ones(1))
    with enable_checkpointing():
        tracker.save(batch, None, "test", None)
    assert not tracker.portals
    tracker.copy(batch, None, None, None, "test")
    with enable_checkpointing():
        assert tracker.load(batch, None, "test") is None
    with enable_recomputing():
        assert tracker.load(batch, None, "test") is None
        tracker.save(batch, None, "test", None)
    assert not tracker.tensors
    with pytest.raises(KeyError):
        tracker.load(batch, None, "test")


def test_a_portal_is_reused() -> None:
    tracker = SkipTrackerThroughPortals(ACROSS)
    batch = Batch(torch.ones(1))
    tracker.save(batch, None, "test", torch.ones(1))
    portal = tracker.portals[None, "test"]
    tracker.save(batch, None, "test", torch.ones(1))
    assert tracker.portals[None, "test"] is portal


def test_two_forwards_have_gradients_of_their_own() -> None:
    x = torch.ones(2, requires_grad=True)
    tracker, outs, portals = SkipTrackerThroughPortals(ACROSS), [], []
    for factor in (1, 10):
        batch = Batch(torch.ones(2, requires_grad=True))
        tracker.save(batch, None, "test", x[factor // 10] * factor)
        portals.append(tracker.portals[None, "test"])
        outs.append(tracker.load(batch, None, "test"))
    assert portals[0] is not portals[1]
    sum(outs).backward()
    assert x.grad.tolist() == [1, 10]


def test_life_without_recomputation() -> None:
    tracker = SkipTrackerThroughPortals(ACROSS)
    batch = Batch(torch.ones(1))
    tracker.save(batch, None, "test", torch.ones(1))
    portal = tracker.portals[None, "test"]
    assert portal.tensor_life == 1
    tracker.load(batch, None, "test")
    assert portal.tensor_life == 0
    assert portal.tensor is None


def test_life_with_recomputation() -> None:
    tracker = SkipTrackerThroughPortals(ACROSS)
    batch, tensor = Batch(torch.ones(1)), torch.ones(1)
    lives = []
    for mode, step in (
        (enable_checkpointing, lambda: tracker.save(batch, None, "test", tensor)),
        (enable_checkpointing, lambda: tracker.load(batch, None, "test")),
        (enable_recomputing, lambda: tracker.load(batch, None, "test")),
        (enable_recomputing, lambda: tracker.save(batch, None, "test", tensor)),
    ):
        with mode():
            step()
        lives.append(tracker.portals[None, "test"].tensor_life)
    assert lives == [2, 1, 0, 0]


class Dropping(torch.autograd.Function):
    """Runs a partition without keeping activations, and once more in the backward."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, partition: nn.Module, tracker: SkipTracker, x: Tensor) -> Tensor:
        ctx.partition, ctx.tracker = partition, tracker
        ctx.save_for_backward(x)
        with use_skip_tracker(tracker), enable_checkpointing():
            return partition(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with use_skip_tracker(ctx.tracker), enable_recomputing(), torch.enable_grad():
            y = ctx.partition(x)
        torch.autograd.backward(y, grad)
        return None, None, None, x.grad


def run(partitions: list[nn.Sequential], x: Tensor, recompute: bool) -> Tensor:
    """One micro-batch through partitions, each skip copied before the partition that pops it."""
    return run_with(SkipTrackerThroughPortals(inspect_skip_layout(partitions)), partitions, x, recompute)


def run_with(
    tracker: SkipTrackerThroughPortals, partitions: list[nn.Sequential], x: Tensor, recompute: bool
) -> Tensor:
    for j, partition in enumerate(partitions):
        batch = Batch(x)
        for _, ns, name in tracker.skip_layout.copy_policy(j):
            tracker.copy(batch, None, None, ns, name)
        x = batch.value
        if recompute:
            x = Dropping.apply(torch.empty(0, requires_grad=True), partition, tracker, x)
        else:
            with use_skip_tracker(tracker):
                x = partition(x)
    return x


def unet() -> list[nn.Sequential]:
    def scale() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    @skippable(stash=["far"])
    class Far(nn.Module):
        def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
            yield stash("far", x)
            return x.sin()

    @skippable(pop=["far"])
    class Back(nn.Module):
        def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
            far = yield pop("far")
            return x * far

    return [
        nn.Sequential(scale(), Far(), scale()),
        nn.Sequential(scale(), Stash(), scale(), Pop()),
        nn.Sequential(scale()),
        nn.Sequential(scale(), Back(), scale()),
    ]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_equal_those_of_a_plain_sequential(recompute: bool) -> None:
    torch.manual_seed(0)
    partitions = [part.double() for part in unet()]
    full = nn.Sequential(*partitions)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(full(x).pow(2).sum(), [x, *full.parameters()])
    tracker = SkipTrackerThroughPortals(inspect_skip_layout(partitions))
    y = run_with(tracker, partitions, x, recompute)
    held = [portal.tensor is not None for portal in tracker.portals.values()]
    assert held == [recompute]  # until the recomputation, or not even until the backward
    y.pow(2).sum().backward()
    assert not any(portal.tensor is not None for portal in tracker.portals.values())
    for found, value in zip([x, *full.parameters()], wanted, strict=True):
        torch.testing.assert_close(found.grad, value, rtol=1e-12, atol=1e-12)


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_a_cut_main_path_loses_no_gradient() -> None:
    partitions = [nn.Sequential(nn.Linear(2, 2), Stash()), nn.Sequential(Cut(), nn.Linear(2, 2), Pop())]
    full = nn.Sequential(*partitions)
    x = torch.randn(3, 2)
    wanted = torch.autograd.grad(full(x).pow(2).sum(), list(full.parameters()))
    run(partitions, x, recompute=False).pow(2).sum().backward()
    for parameter, value in zip(full.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, value)


def test_an_integer_main_path() -> None:
    @skippable(stash=["skip"])
    class Embed(nn.Embedding):
        def forward(self, ids: Tensor) -> Generator[stash, None, Tensor]:
            yield stash("skip", super().forward(ids))
            return ids

    @skippable(pop=["skip"])
    class Take(nn.Module):
        def forward(self, ids: Tensor) -> Generator[pop, Tensor, Tensor]:
            return (yield pop("skip")) * ids[:, None]

    partitions = [nn.Sequential(Embed(5, 2)), nn.Sequential(Take())]
    ids = torch.tensor([1, 3])
    run(partitions, ids, recompute=False).sum().backward()
    assert partitions[0][0].module.weight.grad.sum(1).tolist() == [0, 2, 0, 6, 0]
    with pytest.raises(RuntimeError, match="could not return through a recomputed partition"):
        run(partitions, ids, recompute=True)


def test_a_skip_that_is_cut_off_by_recomputation_is_refused() -> None:
    skip = torch.ones(1, requires_grad=True)
    tracker = SkipTrackerThroughPortals(ACROSS)
    batch = Batch(torch.ones(1))
    with torch.no_grad(), enable_checkpointing():
        tracker.save(batch, None, "test", skip)
        tracker.load(batch, None, "test")
    with enable_recomputing():
        tracker.load(batch, None, "test")  # its batch needs no gradient
        tracker.save(batch, None, "test", skip * 1)
    with pytest.raises(RuntimeError, match="the main path was detached"):
        batch[0].sum().backward()


def test_structures_of_tensors() -> None:
    batch = Batch(({"ids": torch.arange(3), "x": torch.ones(2)}, None, 5))
    assert len(batch) == 2
    assert lane_of(batch) == 1
    assert not batch.atomic
    batch[1] = torch.zeros(2)
    assert batch.tensor_or_tensors[0]["x"].tolist() == [0, 0]
    assert Batch(torch.ones(1)).atomic
    assert lane_of(Batch(None)) is None


@pytest.mark.parametrize("batch", [[torch.ones(1)], torch.ones(1)])
def test_a_batch_is_any_list_of_tensors(batch: Any) -> None:
    x = torch.ones(1, requires_grad=True)
    tracker = SkipTrackerThroughPortals(ACROSS)
    tracker.save(batch, None, "test", x * 2)
    tracker.load(batch, None, "test").backward()
    assert float(x.grad) == 2
