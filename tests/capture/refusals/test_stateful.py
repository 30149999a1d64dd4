"""Python attributes that a forward changes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.capture.refusals.stateful import copy_of
from fxdp.errors import CaptureError
from fxdp.ir.graph.model_tensors import placeholder_for
from tests.capturing import capture


class _Model(nn.Module):
    """`body(self, self.fc(x))`"""

    def __init__(self, body: Callable[[_Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = body
        self.steps = 0
        self.state: Tensor | None = None
        self.past: deque[Tensor] = deque(maxlen=3)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, nn.functional.dropout(self.norm(self.fc(x)), 0.5))


def _counts(model: _Model, x: Tensor) -> Tensor:
    model.steps += 1
    return x.mean() * 0.5**model.steps


def _recurs(model: _Model, x: Tensor) -> Tensor:
    x = x if model.state is None else x + model.state
    model.state = x.mean(0).detach()
    return x.mean()


def _replays(model: _Model, x: Tensor) -> Tensor:
    model.seen.append(x.detach().mean(0))
    return x.mean() + torch.stack(model.seen).sum()


def _looks_back(model: _Model, x: Tensor) -> Tensor:
    model.past.append(x.detach().mean(0))
    return x.mean() * len(model.past)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (_counts, "steps of the model"),
        (_recurs, "state of the model"),
        (_replays, "seen of the model"),
        (_looks_back, "past of the model"),
    ],
)
def test_a_model_that_remembers_is_refused(body: Callable[[_Model, Tensor], Tensor], named: str) -> None:
    with pytest.raises(CaptureError, match=rf"from one call to the next.*\({named} \(_Model\) at .*:\d+ `"):
        capture(_Model(body), (torch.randn(6, 4),), {})


class _Counter:
    def __init__(self) -> None:
        self.steps = 1


def test_an_object_that_remembers_is_refused() -> None:
    """Its model holds it, and it is no module."""

    class Counts(_Model):
        def __init__(self) -> None:
            super().__init__(_counts_outside)
            self.counter = _Counter()

    with pytest.raises(CaptureError, match=r"next.*\(steps of counter of the model at .*its second call"):
        capture(Counts(), (torch.randn(6, 4),), {})


def _counts_outside(model: Any, x: Tensor) -> Tensor:
    model.counter.steps += 1
    return x.mean() * 0.5**model.counter.steps


def _shows(model: _Model, x: Tensor) -> Tensor:
    model.state = x
    model.steps += 1
    return x.mean() + model.state.square().mean()


def test_a_value_that_is_only_shown_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Batch statistics and dropout differ from call to call, too, which is no memory."""
    model = _Model(_shows)
    with caplog.at_level(logging.WARNING, "fxdp"):
        capture(model, (torch.randn(6, 4),), {})
    (record,) = (record for record in caplog.records if record.name == "fxdp")
    assert record.getMessage().startswith("the forward sets steps of the model (_Model) at ")
    assert "`model.steps += 1`, state of the model (_Model) at " in record.getMessage()
    assert (model.state, model.steps) == (None, 0)


def test_what_a_package_notes_of_its_first_call_is_no_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers sets `model._output_capturing_hooks_installed`, of which a user can change nothing."""
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "noting.py").write_text("def note(model, x):\n    model.steps = 1\n    return x.mean()\n")
    monkeypatch.syspath_prepend(str(package))
    with caplog.at_level(logging.INFO, "fxdp"):
        capture(_Model(importlib.import_module("noting").note), (torch.randn(6, 4),), {})
    (record,) = (record for record in caplog.records if "the forward sets" in record.getMessage())
    assert record.levelno == logging.INFO


@pytest.mark.parametrize(("body", "refused"), [(_shows, False), (_counts, True)])
def test_of_sharded_parameters_others_stand_in(
    body: Callable[[_Model, Tensor], Tensor], *, refused: bool
) -> None:
    """They have values of their own, no zeros, which would hide what depends on the call."""
    model = _Model(body)
    for owner in (model.fc, model.norm):
        owner.weight, owner.bias = map(placeholder_for, (owner.weight, owner.bias))
    words = pytest.raises(CaptureError, match="from one call to the next")
    with words if refused else contextlib.nullcontext():
        capture(model, (torch.randn(6, 4),), {})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_weights_computed_before_each_forward_are_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.utils.spectral_norm(nn.Linear(3, 2)))
    assert fxdp.verify(model, (torch.randn(8, 4),), splits=[[5, 2, 0, 1]]).ok
    assert not [record for record in caplog.records if record.name == "fxdp"]


def test_a_layer_of_two_names_is_not_changed_by_being_called(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    fxdp.plan(nn.Sequential(layer, nn.ReLU(), layer), (torch.randn(2, 4),))
    assert caplog.messages == []


def test_recurrent_layers_list_their_weights(caplog: pytest.LogCaptureFixture) -> None:
    """They make the lists anew while they are traced, which is no memory of a model's."""
    model = nn.Sequential(nn.GRU(4, 3))
    model.forward = lambda x: model[0](x)[0].sum()  # type: ignore[method-assign]
    fxdp.compile(model, backend="eager", batch_dims=1)(torch.randn(5, 2, 4)).backward()
    assert not caplog.messages


def test_a_rank_without_samples_has_a_mean_of_nothing() -> None:
    """Its NaN is the same at both calls, so nothing is remembered."""

    def body(model: _Model, x: Tensor) -> Tensor:
        model.visited = True
        return x.mean()

    captured = capture(_Model(body), (torch.randn(0, 4),), {})
    assert len(captured.leaves) == 1


class Keeps(nn.Module):
    """Keeps what it computed, as hooks that gather features do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.features: dict[str, list[Tensor]] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        self.features["fc"] = [self.last]
        return self.last.sum()


def test_what_a_forward_left_is_copied_as_values() -> None:
    model = Keeps()
    model(torch.randn(4, 3)).backward()
    twin = copy_of(model)
    assert twin.last is twin.features["fc"][0]
    assert torch.equal(twin.last, model.last)
    assert not twin.last.requires_grad
    assert twin.fc.weight is not model.fc.weight


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].lock = threading.Lock()  # type: ignore[assignment]
    words = r"refuses lock of 0 \(Linear\): TypeError: cannot pickle.*__deepcopy__"
    with pytest.raises(CaptureError, match=words):
        fxdp.verify(model, (torch.randn(4, 4),), mesh={"dp": 2})


_DICE = random.Random(0)
_NUMPY_DICE = np.random.default_rng(0)
_OLD_DICE = np.random.RandomState(0)


@pytest.mark.parametrize(
    ("throw", "named"),
    [
        (lambda: _DICE.random(), "_DICE"),
        (lambda: float(_NUMPY_DICE.random()), "_NUMPY_DICE"),
        (lambda: float(_OLD_DICE.rand()), "_OLD_DICE"),
    ],
)
def test_generators_of_the_models_own_that_results_depend_on(throw: Callable[[], float], named: str) -> None:
    with pytest.raises(CaptureError, match=rf"from one call to the next.*{named}"):
        capture(_Model(lambda model, x: x.mean() * throw()), (torch.randn(6, 4),), {})


def test_a_generator_in_an_attribute() -> None:
    model = _Model(lambda model, x: x.mean() * model.dice.random())
    model.dice = random.Random(1)  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"from one call to the next.*\(dice of the model"):
        capture(model, (torch.randn(6, 4),), {})


def test_a_generator_that_is_made_alike_at_each_call() -> None:
    capture(_Model(lambda model, x: x.mean() * np.random.default_rng(3).random()), (torch.randn(6, 4),), {})
