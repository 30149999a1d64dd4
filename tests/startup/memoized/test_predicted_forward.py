"""A joint graph whose forward was foretold is the one that torch makes after a run of the forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxdp import torch_compat
from fxdp.capture.captured import Captured
from fxdp.capture.joint import raw_joint
from fxdp.errors import CaptureError
from fxdp.startup.memoized import predicted_forward
from fxdp.startup.memoized.predicted_forward import _predict, _PredictedForward, _WrongPredictionError
from tests.capturing import capture

pytestmark = pytest.mark.usefixtures("float64")

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Language(nn.Module):
    """Draws, a loss among other results, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = F.dropout(self.embed(x), training=self.training)
        logits = self.head(hidden)
        return {
            "logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), x.flatten()),
            "best": logits.argmax(-1), "last": hidden[:, -1].detach(),
        }  # fmt: skip


class Counts(nn.Module):
    """Statistics that a batch norm writes, and a count that the model writes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("never_read", torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        x = self.norm(self.linear(x)).relu_()
        return x.mean(), x[:, 0]


class Frozen(nn.Module):
    """Some values without a gradient: of a frozen layer, detached, under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            scale = self.second(x).std()
        y = self.first(x)
        return y, self.second(y).T, scale, self.second(y.detach()) * scale, (y > 0)


class Returned(nn.Module):
    """A result that is the input's own memory: not foretold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.view(-1, 2, 2)


class Chosen(nn.Module):
    """As many rows as the data say: not foretold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0]).sum()


def _rows() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "language": (Language, lambda: torch.randint(11, (6, 5)), {}),
    "counts": (Counts, _rows, {}),
    "counts, eager's ops": (Counts, _rows, {"couple": False}),
    "frozen": (Frozen, _rows, {}),
    "frozen, all": (Frozen, _rows, {"differentiable": "all"}),
    "any length": (lambda: nn.Linear(4, 3), lambda: _rows().view(3, 2, 4), {"dynamic": True}),
    "returned": (Returned, _rows, {"differentiable": "all"}),
    "chosen": (Chosen, _rows, {}),
}
NOT_FORETOLD = {"any length", "returned", "chosen"}


@contextmanager
def counted(told: Callable[[Any], Any] = _predict) -> Iterator[list[Any]]:
    """What `told` says is foretold; gives a list of what was traced, with runs of the forward in it."""
    seen: list[Any] = []
    own_replay, own_trace = torch_compat.replay, torch_compat.joint_graph

    def replay(*args: Any) -> Any:
        seen.append("run")
        return own_replay(*args)

    def trace(*args: Any) -> fx.GraphModule:
        seen.append(own_trace(*args))
        return seen[-1]

    with (
        mock.patch.object(predicted_forward, "_predict", told),
        mock.patch.object(torch_compat, "replay", replay),
        mock.patch.object(torch_compat, "joint_graph", trace),
    ):
        yield seen


def lines(gm: fx.GraphModule) -> list[str]:
    """Each op with its operands, value, descriptor and line; sizes, which any node may give, as numbers."""
    names: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> str:
        value = node.meta.get("val")
        return str(value.node.expr) if isinstance(value, _SIZES) else names.setdefault(node, f"%{len(names)}")

    def kind(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return str(value)
        lies = value.shape, value.stride(), value.storage_offset()
        return value.dtype, value.requires_grad, *map(str, lies)

    found = []
    for node in gm.graph.nodes:
        if not isinstance(value := node.meta.get("val"), _SIZES):
            given = fx.map_arg((node.args, node.kwargs), name)
            meta = [node.meta.get(key) for key in ("desc", "partitioner_tag", "stack_trace")]
            found.append(f"{name(node)} {node.target} {given} {pytree.tree_map(kind, value)} {meta}")
    return found


def made(name: str, mode: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Captured:
    torch.manual_seed(0)
    model, inputs, options = MODELS[name]
    with mode():
        return capture(model().double(), (inputs(),), {}, **options)


@cache
def by_both_runs(name: str, mode: Callable[[], AbstractContextManager[Any]]) -> tuple[list[str], Captured]:
    with counted(lambda gm: None) as traced:
        captured = made(name, mode)
    assert traced[:2] == ["run", "run"]
    return lines(traced[-1]), captured


CASES = [(name, nullcontext) for name in MODELS] + [("language", torch.no_grad), ("counts", torch.no_grad)]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_graph_is_that_of_both_runs(name: str, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    with counted() as traced:
        captured = made(name, mode)
    text, other = by_both_runs(name, mode)
    assert lines(traced[-1]) == text
    assert (captured.detached, captured.conditions) == (other.detached, other.conditions)
    if name not in NOT_FORETOLD:
        assert traced[:-1] == ["run"], "the forward ran twice"


FAULTS: dict[str, tuple[str, Callable[[_PredictedForward], _PredictedForward]]] = {
    "a write less": ("counts", lambda told: replace(told, written=told.written[1:])),
    "no write": ("counts", lambda told: replace(told, written=())),
    "a gradient more": ("frozen, all", lambda told: _with(told, 2, lambda t: t, True)),
    "a gradient less": ("frozen, all", lambda told: _with(told, 1, lambda t: t, False)),
    "another dtype": ("frozen, all", lambda told: _with(told, 1, lambda t: t.float(), True)),
    "another size": ("frozen, all", lambda told: _with(told, 1, lambda t: t[1:], True)),
    "another order": ("frozen, all", lambda told: _with(told, 1, lambda t: t.contiguous(), True)),
}


def _with(
    told: _PredictedForward, at: int, change: Callable[[Tensor], Tensor], gradient: bool
) -> _PredictedForward:
    with told.results[at][0].fake_mode:  # type: ignore[attr-defined]
        changed = change(told.results[at][0])
    return replace(told, results=(*told.results[:at], (changed, gradient), *told.results[at + 1 :]))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_foretold_wrongly_is_found(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    name, change = FAULTS[fault]

    def wrongly(gm: fx.GraphModule) -> _PredictedForward:
        told = _predict(gm)
        assert told is not None
        return change(told)

    with counted(wrongly) as first, caplog.at_level("DEBUG", "fxdp"):
        made(name)
    assert _WrongPredictionError.__name__ in caplog.text
    assert first[:-1] == ["run", "run", "run"]  # one that was thrown away, and torch's two
    assert lines(first[-1]) == by_both_runs(name, nullcontext)[0]


class ChosenAside(Chosen):
    """The same by a mask that is given, in a region of `torch.no_grad()`, which is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        y = self.linear(x)
        with torch.no_grad():
            self.total += y[mask].sum(0)
        return y.square().sum()


def test_rows_chosen_in_a_region_are_not_foretold() -> None:
    with counted() as traced:
        captured = capture(ChosenAside().double(), (_rows(), _rows()[:, 0] > 0), {})
    assert traced[:2] == ["run", "run"]
    assert captured.strategy == "symbolic"


def test_a_trace_that_fails_under_no_grad_leaves_gradients_on() -> None:
    def failing(*args: Any) -> Any:
        torch._C._set_grad_enabled(False)  # as an exported region of `no_grad` that raises
        raise RuntimeError

    exported = mock.Mock(fakes=())
    with mock.patch.object(torch_compat, "joint_graph", failing), pytest.raises(RuntimeError):
        raw_joint.traced(mock.Mock(), exported, {})
    assert torch.is_grad_enabled()


class TensorGuards(nn.Module):
    """Statistics that are no buffers: constants of the graph, which a batch norm would write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = [torch.full((4,), 2.0, dtype=torch.float64), torch.full((4,), 3.0, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.linear(x), *self.held, training=True).square().mean()


def test_nothing_is_written_that_has_values() -> None:
    model = TensorGuards().double()
    with counted() as traced, contextlib.suppress(CaptureError):
        capture(model, (_rows(),), {})
    assert "run" in traced
    assert [t.unique().tolist() for t in model.held] == [[2.0], [3.0]]
