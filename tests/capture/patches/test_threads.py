"""Other threads while a model is captured: they have torch's, Python's and NumPy's own functions.

The model hands over to another thread in the midst of its forward and waits for it, so that what that thread
does happens while all patches are installed.
"""

from __future__ import annotations

import logging
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.data import DataLoader, Dataset

import fxdp
from fxdp.ir.graph.graph_text import graph_text
from tests.capturing import capture
from tests.limits import HANG_S


class _Own(Tensor):
    """Has a length of its own, which `len` of a captured model does not ask for."""

    def __len__(self) -> int:
        return 77


class _Numbers(Dataset[Tensor]):
    """Draws each sample, in the thread or process that loads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        assert type(random.random()) is float
        assert isinstance(np.random.rand(), float)
        return torch.full((3,), float(index)) + torch.rand(3) * random.uniform(0.0, 1e-3)


class _Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def draw() -> None:
    """Numbers of Python and NumPy, and generators that are seeded."""
    assert 0.0 <= random.random() + 0.0 < 1.0
    assert random.randint(3, 3) == 3
    assert sorted(random.sample(range(4), 4)) == [0, 1, 2, 3]
    assert np.random.rand(2).shape == (2,)
    assert 0.0 <= float(np.random.uniform(0.0, 1.0)) <= 1.0
    own, numpys = random.Random(0), np.random.default_rng(0)
    assert own.random() == random.Random(0).random()
    assert numpys.random() == np.random.default_rng(0).random()
    generator = torch.Generator().manual_seed(1)
    assert torch.rand(3, generator=generator).shape == (3,)


def seed() -> None:
    """The generator that all threads share, while none of the others draws."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = torch.rand([])
        torch.manual_seed(5)
        assert torch.equal(first, torch.rand([]))


def train() -> None:
    """Another model: forward, backward, step; derivatives by all functions that give them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.5), nn.Linear(3, 1))
    model.to(torch.float32).to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        x = torch.rand(4, 3, requires_grad=True)
        optimizer.zero_grad()
        loss = _Doubled.apply(model(x)).square().mean()
        loss.backward()
        assert x.grad is not None
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    w = torch.rand(3, requires_grad=True)
    for reentrant in (True, False):
        (grad,) = torch.autograd.grad(checkpoint(lambda t: t.square(), w, use_reentrant=False).sum(), w)
        assert torch.equal(grad, 2 * w.detach())
        w.grad = None
        checkpoint(lambda t: t.square(), w, use_reentrant=reentrant).sum().backward()
        assert torch.equal(w.grad, 2 * w.detach())  # type: ignore[arg-type]
    torch.autograd.backward([w.sum()])
    assert torch.equal(torch.func.grad(lambda t: t.square().sum())(w.detach()), 2 * w.detach())
    effects: list[Tensor] = []
    y = w * 2
    y.register_hook(effects.append)  # returns nothing, which capture refuses
    y.sum().backward()
    assert len(effects) == 1
    assert CheckpointFunction.apply.__self__ is CheckpointFunction  # type: ignore[attr-defined]


def ask() -> None:
    """Values of tensors, in statements that raise and elsewhere; `.data`, and how a tensor lies."""
    t = torch.ones(3, dtype=torch.bool)
    assert t.all()
    if not torch.isfinite(torch.rand(3)).all():
        raise ValueError("not finite")
    assert bool(t[0]) is True
    assert type(torch.tensor(3).item()) is int
    assert torch.tensor(2.5).item() > 2
    assert (torch.rand(1) < 0.5).item() in (True, False)
    assert type(torch.rand([]).item()) is float
    p = nn.Parameter(torch.zeros(2))
    p.data = torch.ones(3)  # another shape, which capture refuses
    assert p.shape == (3,)
    assert p.data.is_contiguous()
    assert p.data.stride() == (1,)
    assert torch.as_strided(p.data, (2,), (1,)).view(1, 2).shape == (1, 2)
    assert F.embedding_bag(torch.tensor([[0, 1]]), torch.eye(2)).shape == (1, 2)
    assert torch.cov(torch.rand(2, 5)).shape == (2, 2)


def load(workers: int = 0) -> None:
    """A data loader."""
    batches = list(DataLoader(_Numbers(), batch_size=2, num_workers=workers, shuffle=True))
    assert [b.shape for b in batches] == [(2, 3), (2, 3)]
    assert all(isinstance(b.sum().item(), float) for b in batches)


def load_in_a_process() -> None:
    """A data loader whose samples are made in a fork of this process, patches and all."""
    load(workers=1)


def measure() -> None:
    """`len`, from a module that counts as the user's."""
    assert len(torch.rand(4, 2)) == 4
    assert type(len(torch.rand(4, 2))) is int
    assert len(torch.rand(4).as_subclass(_Own)) == 77


class _Notice(UserWarning):
    """Which the tests' filters make an error."""


def complain() -> None:
    """Warnings and torch's log, neither of which capture may keep from anybody else."""
    effects: list[str] = []
    log, handler = logging.getLogger("torch.optim"), logging.Handler()
    handler.emit = lambda record: effects.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    with pytest.raises(_Notice):
        warnings.warn("of another thread", _Notice, stacklevel=1)
    with pytest.warns(_Notice, match="listened"):
        warnings.warn("to which it has listened", _Notice, stacklevel=1)
    log.warning("of another thread")
    log.removeHandler(handler)
    assert effects == ["of another thread"]


Action: TypeAlias = Callable[[], None]
ACTIONS: tuple[Action, ...] = (draw, seed, train, ask, load, measure, complain)


@dataclass
class _Other:
    """Another thread, and what it was asked to do while a model was traced."""

    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    actions: tuple[Action, ...] = ()
    once: tuple[Action, ...] = ()
    """What is done the first time only."""
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def act(self) -> None:
        """Let the other thread do all of it now; this one has patches meanwhile."""
        actions, self.once = (*self.actions, *self.once), ()
        for action in actions:
            try:
                self.pool.submit(action).result(HANG_S)
            except BaseException as error:  # a trace would tell it in other words
                self.failed.append(f"{action.__name__}: {type(error).__name__}: {error}")
            self.done.append(action.__name__)


@pytest.fixture
def other() -> Iterator[_Other]:
    """Another thread, which may fork.

    A fork frees what its other threads keep, as this one DTensor's cache. That has groups of earlier tests,
    whose threads are not in the fork: gloo's destructor waits for these for ever.
    """
    torch._C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]
    made = _Other()
    yield made
    made.pool.shutdown()


class _Symbolic(nn.Module):
    """Draws, checks and has BatchNorm, so that all patches are at work."""

    def __init__(self, other: _Other) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)
        self.other = weakref.ref(other)  # of what code sees otherwise, a trace leaves nothing changed

    def forward(self, x: Tensor) -> Tensor:
        assert (x < 1e6).all()
        warnings.warn("of the model", _Notice, stacklevel=1)
        other = self.other()
        assert other is not None
        other.act()
        if random.random() > 2 or torch.rand([]) > 2:
            return x.sum()
        y = checkpoint(self.fc, x * len(x), use_reentrant=False)
        assert isinstance(y, Tensor)
        return self.norm(y).square().mean()  # type: ignore[no-any-return]


class _Static(_Symbolic):
    """Fixes its batch: the labels of a contrastive loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.fc(x)
        labels = torch.arange(int(x.shape[0]))
        return F.cross_entropy(y @ y.T, labels)


def _x() -> Tensor:
    return torch.randn(8, 4)


def _owners() -> list[Any]:
    """All whose attributes capture exchanges."""
    kinds = [torch.Tensor, nn.Module, nn.BatchNorm1d, nn.SyncBatchNorm, torch.autograd.Function]
    norm = nn.modules.batchnorm._BatchNorm
    modules = [torch, F, torch.autograd, torch.func, torch.random, torch.cuda, random, np.random]
    loaders = [torch.utils.checkpoint, nn.modules.transformer, torch.distributions.constraints]
    return [*kinds, norm, CheckpointFunction, *modules, *loaders]


def _attributes() -> list[dict[str, int]]:
    """The identity of each attribute."""
    skipped = ("__warningregistry__", "__abstractmethods__")
    return [
        {k: id(v) for k, v in vars(owner).items() if k not in skipped and not k.startswith("_abc")}
        for owner in _owners()
    ]


@pytest.mark.parametrize("kind", [_Symbolic, _Static])
def test_threads_are_left_alone_while_a_model_is_captured(kind: type[_Symbolic], other: _Other) -> None:
    torch.manual_seed(0)
    model, before = kind(other), _attributes()
    alone = capture(model, (_x(),), {})
    other.actions, other.once = ACTIONS, (load_in_a_process,)
    found = capture(model, (_x(),), {})
    assert other.failed == []
    assert other.done[: len(ACTIONS) + 1] == [*(action.__name__ for action in ACTIONS), "load_in_a_process"]
    assert len(other.done) > (14 if kind is _Static else 6)  # each forward that is traced
    assert found.static == (kind is _Static)
    assert graph_text(found.gm) == graph_text(alone.gm)
    assert len(found.checks) == len(alone.checks) == 1
    changed = [
        (getattr(owner, "__name__", owner), {k for k in was.keys() | now.keys() if was.get(k) != now.get(k)})
        for owner, was, now in zip(_owners(), before, _attributes(), strict=True)
        if was != now
    ]
    assert changed == []
    assert "len" not in globals()


def test_threads_are_left_alone_by_many_captures(other: _Other) -> None:
    """One that does all the time what the others do once, meanwhile plans are made again and again."""
    over, rounds = threading.Event(), 0
    model = _Symbolic(other)

    def live() -> None:
        nonlocal rounds
        while not over.is_set():
            for action in (draw, train, ask, measure):
                action()
            rounds += 1

    living = other.pool.submit(live)
    try:
        texts = {fxdp.plan(model, (_x(),), mesh={"dp": 2}).text for _ in range(2)}
    finally:
        over.set()
    living.result(HANG_S)
    assert rounds > 0
    assert len(texts) == 1
    draw()
    train()
    ask()


def test_two_threads_capture_at_the_same_time(other: _Other) -> None:
    before = _attributes()

    def captures() -> list[str]:
        own = _Other()
        model = _Symbolic(own)
        return [graph_text(capture(model, (_x(),), {}).gm) for _ in range(2)]

    first = other.pool.submit(captures)
    second = captures()
    assert first.result(HANG_S) == second == [second[0]] * 2
    assert _attributes() == before
