"""Calls that torch breaks into several graphs compute what one device computes, or say why they do not."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.dynamo.backend import backend
from fxdp.errors import FxdpError
from tests.rank_pool import RankPool

OPTIONS = {"graph_breaks": True, "backend": "eager"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch._dynamo.disable
def bent(h: Tensor, scale: Tensor) -> Tensor:
    """What torch cannot trace, and treats samples one by one; `scale` is the same for all of them."""
    return (h * scale).tanh() + scale.sum()


@torch._dynamo.disable
def averaged(h: Tensor) -> Tensor:
    return h.mean()


class Printed(nn.Module):
    """BatchNorm before and after a break, a mean over what counts in the last graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.before = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.last, self.after = nn.Linear(5, 1), nn.BatchNorm1d(1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.before(self.first(x)).tanh()
        print(end="")
        h = self.after(self.last(h)).squeeze(-1)
        mask = (y > 0).to(h.dtype)
        return ((h - y).square() * mask).sum() / mask.sum(), h


class Branching(nn.Module):
    """Python decides on a sum over the batch, whose sign may differ on ranks, and computes with another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        h = self.left(h) if h.sum() > 0 else self.right(h)
        scale = h.detach().square().mean().item()
        n = h.shape[0]
        h = self.first(h) * scale / n
        return (h.sum(-1) - y).square().mean(), h


class Tied(nn.Module):
    """A parameter in two graphs, and Python between them with a value that is complete on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(4) + 0.5)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.gain.exp() * x.mean()
        h = bent(x @ self.weight, scale)
        h = self.norm(h) @ self.weight * scale
        return F.cross_entropy(h, y.long().clamp(0, 3), reduction="sum") / h.shape[0], h


class Nested(nn.Module):
    """The break is in a part of the model, in a loop, whose function torch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.through(x)
        return (self.head(h).squeeze(-1) - y).square().mean(), h

    def through(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = part(h)
            torch._dynamo.graph_break()
        return h


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x)).tanh()


KINDS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (Printed, Branching, Tied, Nested)}
PARTS = [(4, 3), (2, 5), (3, 0), (1, 6), (4, 3)]
LARGE = [(4, 3), (2, 5), (4, 3)]
"""For a function of which torch makes no graph, and so asks nobody whether it takes parts of 0 or 1."""


def _far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item() if a.numel() else 0.0


def _samples(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4).double(), torch.randint(-2, 4, (count,)).double()


def _apart(name: str, parts: Sequence[Sequence[int]], **options: Any) -> tuple[float, list[str], int]:
    """How far training is from one device; what was said; how many graphs were made after the second step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, said = dist.get_rank(), _Said()
    model = KINDS[name]().double()
    alone = copy.deepcopy(model)
    made = []

    def counted(gm: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        found = backend(gm, inputs, **kwargs)
        made.append(step)
        return found

    compiled = torch.compile(model, backend=counted, options={**OPTIONS, **options})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    far = 0.0
    with said, _asking_for_grad():
        for step, sizes in enumerate(parts):  # noqa: B007 (read by counted)
            x, y = _samples(sum(sizes))
            own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            (loss, rows), (expected, all_rows) = compiled(x[own], y[own]), alone(x, y)
            far = max(far, _far(loss, expected), _far(rows, all_rows[own]))
            for optimizer, value in zip(optimizers, (loss, expected), strict=True):
                optimizer.zero_grad()
                value.backward()
            pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
            for (_, p), q in pairs:
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None and q.grad is not None:
                    far = max(far, _far(p.grad, q.grad))
            for optimizer in optimizers:
                optimizer.step()
            far = max([far, *map(_far, model.buffers(), alone.buffers())])
    torch._dynamo.reset()
    return far, said.lines, sum(at > 1 for at in made)


@contextlib.contextmanager
def _asking_for_grad() -> Iterator[None]:
    """Dynamo asks each tensor that it meets for `.grad`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


class _Said(logging.Handler):
    """What is logged inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger("fxdp").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fxdp").removeHandler(self)


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_one_device(ranks: RankPool, name: str) -> None:
    found = ranks.run(2, _apart, name, LARGE if name == "Nested" else PARTS)
    for far, _, _ in found:
        assert far < 1e-12
    (report,), nothing = (said for _, said, _ in found)
    assert report.startswith("torch makes ")
    assert not nothing  # rank 0 says it for all
    if name == "Printed":
        assert [late for _, _, late in found] == [0, 0]  # no size makes torch ask for another graph
        assert re.search(r'graph 1 of 2 ends at .*`print\(end=""\)`: Failed to trace builtin', report)
        assert report.endswith("graph 2 of 2 ends with Printed.forward")


class ExternalState(nn.Module):
    """What Python must not do outside of all graphs: read a parameter, or give each rank its own mean."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.fc, self.gain = nn.Linear(4, 4), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.fc(x)
        if self.where == "between":
            h = bent(h, self.gain)
            return (h.sum(-1) - y).square().mean()
        if self.where == "mean":
            return (h - averaged(h)).square().mean()
        if self.where == "both":
            h = h * self.gain
        return self.ended(h, y)

    @torch._dynamo.disable
    def ended(self, h: Tensor, y: Tensor) -> Tensor:
        return ((h * self.gain).sum(-1) - y).square().mean()


def _refused(where: str) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ExternalState(where).double()
    compiled = torch.compile(model, backend=backend, options=OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = slice(0, 3) if dist.get_rank() == 0 else slice(3, 7)
    with _asking_for_grad():
        try:
            for _ in range(2):
                x, y = _samples(7)
                compiled(x[own], y[own]).backward()
                optimizer.step()
        except FxdpError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("between", "InputError: .* was computed from gain by Python between two graphs"),
        ("after", "StateError: gain got a gradient, but no graph of torch.compile reads it"),
        ("mean", "InputError: .*"),
        ("both", "AgreementError: the model is no longer the same on all ranks.*parameter gain"),
    ],
)
def test_parameters_outside_of_graphs_are_refused(ranks: RankPool, where: str, words: str) -> None:
    for said in ranks.run(2, _refused, where):
        assert re.match(words, said, re.S), said


class Folding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).flatten(0, 1)
        print(end="")
        return self.fc(h).sum()


def _folded() -> str:
    torch._dynamo.reset()
    with _asking_for_grad(), pytest.raises(FxdpError) as caught:
        torch.compile(Folding(), backend=backend, options=OPTIONS)(torch.randn(3, 2, 4))
    return str(caught.value)


def test_a_batch_that_is_part_of_a_dim_at_a_break_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(2, _folded):
        assert "h, of shape (6, 4), has the batch as a part of its dim 0" in said


def _compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={**OPTIONS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": {"microbatches": 2}}, r"no fxdp.Pipeline\(microbatches=...\): an entire call"),
        ({"pad": 0}, "no pad="),
        ({"graph_breaks": 1}, "graph_breaks is 1, expected True or False"),
        ({"graph_break": True}, "graph_break: did you mean graph_breaks=True"),
    ],
)
def test_options_that_no_part_of_a_call_can_have(options: Any, message: str) -> None:
    with pytest.raises(FxdpError, match=message):
        _compiled(Printed().double(), **options)(*_samples(5))


def test_without_the_option_the_refusal_names_it() -> None:
    with pytest.raises(FxdpError, match=r"(?s)expected fullgraph=True.*graph_breaks.*graph 1 of 2"):
        torch.compile(Printed().double().forward, backend=backend, options={"backend": "eager"})(*_samples(5))


@torch._dynamo.disable
def table(h: Tensor) -> Tensor:
    return torch.ones(3, dtype=h.dtype)


def test_what_python_makes_must_have_the_rows_of_the_batch() -> None:
    def run(x: Tensor) -> Tensor:
        h = x * 2
        return (h.sum() * table(h)).sum()

    with pytest.raises(FxdpError, match=r"of shape \(3,\), was made by Python between two graphs.*5 of them"):
        _compiled(run)(torch.randn(5, 4))
    torch._dynamo.reset()
    assert _compiled(run)(torch.randn(3, 4)).dim() == 0
