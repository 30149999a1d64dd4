"""A joint graph from the disk is the one that was made; whatever changes it is another entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.capture.captured import Captured
from fxdp.capture.export.exported import export
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.inputs import read_inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.joint.symbolic_joint import symbolic_joint
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.metadata import layouts
from fxdp.startup.artifacts import cached_joint as module
from tests.capturing import capture

pytestmark = pytest.mark.usefixtures("float64")


class _Model(nn.Module):
    """With all that an entry holds beside the graph: buffers, constants, a size that is asked for."""

    def __init__(self, scale: float = 2.0, hidden: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 5))
        self.table = torch.arange(5.0)
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x) * self.table * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        if x.shape[0] > 4:
            out = out[:, [4, 3, 2, 1, 0]]
        later = torch.stack([out, out]).unbind(0)[1]  # begins at a place in memory that depends on the batch
        return F.cross_entropy(later, y)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries are kept while a test runs."""
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


_X, _Y = torch.randn(6, 3, dtype=torch.float64), torch.randint(5, (6,))


def _words(found: Captured) -> tuple[str, str]:
    """All of a capture; tensors by what they are, graphs by all that passes read."""
    fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    read = fields.pop("read")
    fields["places"] = [place.name for place in read.places]
    constants = {name: value.tolist() for name, value in fields.pop("constants").items()}
    graph = fields.pop("gm").graph
    metadata = [
        (n.name, str(n.target), n.meta["fxdp"], str(layouts(n)), "seq_nr" in n.meta) for n in graph.nodes
    ]
    return str((fields, constants, metadata)), graph_text(found.gm, {"dp": 2}, exact=True)


def test_a_hit_equals_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Model()
    made = capture(model, (_X, _Y), {})
    assert len(list(folder.iterdir())) == 1
    with torch.no_grad():
        model.body[0].weight.add_(1.0)  # values of parameters and buffers are no part of a program
        model.body[1].running_mean.add_(1.0)
    monkeypatch.setattr(symbolic_joint, "own", _never)
    found = capture(model, (_X, _Y), {})
    assert _words(found) == _words(made)
    own = [any(c is model.table for c in kept.constants.values()) for kept in (made, found)]
    assert own[0] == own[1]


def _never(*args: Any) -> Any:
    raise AssertionError("made anew")


def _key(model: nn.Module, *, x: Tensor = _X, **options: Any) -> str | None:
    model.to(x.dtype)
    inputs = read_inputs(model, (x, _Y), {}, None)
    with capture_patches(model, None):
        exported = export(FlatModule(model, inputs, None), inputs.batch_dims, 7, symbolic=True)
        return module._key(exported, JointOptions(**options))


def test_what_changes_a_program_makes_another_entry() -> None:
    def changed(change: Callable[[_Model], object]) -> _Model:
        model = _Model()
        change(model)
        return model

    same = {_key(_Model()), _key(changed(lambda m: m.body[0].weight.data.add_(1.0)))}
    others = {
        _key(_Model(scale=3.0)),
        _key(changed(lambda m: m.table.add_(1.0))),
        _key(changed(lambda m: m.body[0].weight.requires_grad_(False))),
        _key(changed(lambda m: m.body.append(nn.Linear(5, 5)))),
        _key(_Model(), couple=False),
        _key(_Model(), own_statistics=True),
        _key(_Model(), x=_X.float()),
    }
    assert len(same) == 1
    assert len(same | others) == 8
    assert None not in same | others


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class _WithOwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(self.linear(x)).mean()


def test_a_backward_of_the_users_is_made_each_time(folder: Path) -> None:
    """Its code is in no graph, and may have changed."""
    capture(_WithOwnBackward(), (_X,), {})
    assert not folder.exists()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(3, 5), torch.arange(5.0)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.table).square().mean()


def test_constants_without_values_are_made_each_time(folder: Path) -> None:
    with torch.device("meta"):
        plan = fxdp.plan(_Scaled(), (torch.empty(6, 3),), mesh={"dp": 2})
    assert plan.gradient_bytes == torch.get_default_dtype().itemsize * (3 * 5 + 5)
    assert not folder.exists()
