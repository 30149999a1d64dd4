"""Models, options and orders that cannot run in stages are refused: where, got, expected, remedy."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.skip import pop, skippable, stash
from tests.captures import KNOWN, captured_once
from tests.pipeline.models import Skips, skips


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def _plan(model: nn.Module | None = None, ranks: int = 2, inputs: Any = None, **options: Any) -> Any:
    given = skips(4) if inputs is None else inputs
    with captured_once(KNOWN.setdefault(__name__, {})):  # what is refused here is refused after the capture
        return fxdp.plan((model or Skips()).float(), (), given, mesh={"pp": ranks}, **options)


_X = {"x": torch.randn(4, 6)}


def test_a_loss_outside_of_the_graph() -> None:
    with pytest.raises(fxdp.StageError, match=r"returns no scalar .* Pass loss_fn= to fxdp.compile"):
        _plan(NoLoss(), inputs=_X)


class Scales(Skips):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x.mul_(2), y)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_inputs_that_the_model_changes(microbatches: int) -> None:
    """The step would leave the caller's tensor as it was."""
    with pytest.raises(fxdp.StageError, match=r"changes its input x in place(.|\n)*x = x.clone\(\)"):
        _plan(Scales(), pipeline={"microbatches": microbatches})


# ---- stages ----

_STAGES: dict[str, tuple[Any, str]] = {
    "more than places to cut": (500, r"stages=500\): .* expected 1 to 14 stages; take fewer"),
    "no such module": (["bb"], r"no op of the forward is in a module 'bb'; did you mean 'b'"),
    "two wrong names": (["bb", "dd"], r"(?s)module 'bb'.*module 'dd'"),
    "not in order": (["c", "b"], "expected each after the one before"),
    "twice": (["b", "b"], "expected each after the one before"),
    "the beginning": (["a"], "stage 0 begins by itself"),
    "fewer than ranks": (1, r"stages=1\) makes 1 stages for 2 pipeline ranks; expected at least one"),
    "no names": ([], r"makes 1 stages for 2 pipeline ranks"),
}


@pytest.mark.parametrize("name", _STAGES)
def test_stages_that_do_not_fit(name: str) -> None:
    stages, message = _STAGES[name]
    with pytest.raises(fxdp.StageError, match=message):
        _plan(pipeline={"stages": stages})


@pytest.mark.parametrize("stages", ["b", 0, -1, 2.5, True, ["b", 3], [None]])
def test_stages_that_are_none(stages: Any) -> None:
    with pytest.raises(fxdp.InputError, match=r"stages is .*, expected"):
        _plan(pipeline={"stages": stages})


# ---- micro-batches and schedules ----


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, "2", None, True])
def test_numbers_of_micro_batches(microbatches: Any) -> None:
    with pytest.raises(fxdp.InputError, match=r"microbatches is .*, expected an integer of at least 1"):
        _plan(pipeline={"microbatches": microbatches})


def test_unknown_schedules_have_near_matches() -> None:
    with pytest.raises(fxdp.ScheduleError, match=r"no schedule `1f1c`.*`1f1b`"):
        _plan(pipeline={"schedule": "1f1c"})


_FILES: dict[str, tuple[str, str]] = {
    "unknown word": ("0F0,0X0\n1F0,1B0\n", "words that are none of torch's"),
    "not complete": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "is not complete"),
    "other numbers": ("0F0,0B0\n1F0,1B0\n", r"expected equal numbers"),
    "no backward": ("0F0,0F1\n1F0,1F1\n", "has forwards only"),
    "empty": ("", "is empty"),
    "a circle": ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "(?s)goes round in a circle:.*expected an order"),
}


@pytest.mark.parametrize("name", _FILES)
def test_schedules_from_files(name: str, tmp_path: Path) -> None:
    text, message = _FILES[name]
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(fxdp.ScheduleError, match=message):
        _plan(pipeline={"schedule": str(path), "microbatches": 2})


def test_a_schedule_file_that_is_not_there() -> None:
    with pytest.raises(fxdp.ScheduleError, match=r"nowhere.csv cannot be read: .*No such file"):
        _plan(pipeline={"schedule": "nowhere.csv"})


def test_single_device_random_numbers() -> None:
    for options in ({"mesh": {"pp": 2}}, {"mesh": {"dp": 2}, "pipeline": {"microbatches": 2}}):
        with pytest.raises(fxdp.MeshError, match=r"rng=.single-device.* expected rng=.sharded."):
            fxdp.plan(Skips(), (), skips(4), rng="single-device", **options)


# ---- skip connections ----


@skippable(stash=["a"])
class Out(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("a", x)
        return x * 2


@skippable(stash=["a"])
class Silent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@skippable(pop=["a"])
class In(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        value = yield pop("a")
        return x + value


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(6, 6), nn.Sequential(*layers), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.layers(self.first(x))), y)


_SKIPS: dict[str, tuple[Any, str]] = {
    "stashed, never popped": (lambda: Net(Out()), r"layers.0: 'a' is stashed but never popped"),
    "popped, never stashed": (lambda: Net(In()), r"layers.0: 'a' has not been stashed"),
    "stashed twice": (lambda: Net(Out(), Out(), In()), r"layers.1: 'a' is stashed again"),
    "popped twice": (lambda: Net(Out(), In(), In()), r"layers.2: 'a' has not been stashed"),
    "popped before": (lambda: Net(In(), Out()), r"layers.0: 'a' has not been stashed"),
    "declared, not stashed": (lambda: Net(Silent(), In()), r"layers.0: 'a' must be stashed but have not"),
}


@pytest.mark.parametrize("name", _SKIPS)
def test_skips_that_do_not_match(name: str) -> None:
    make, message = _SKIPS[name]
    with pytest.raises(fxdp.CaptureError, match=rf"(?s)do not match:.*{message}.*Each declared name must be"):
        _plan(make())
