"""Forwards that assign to their modules, and that read values of their buffers in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Buffer, Mutation
from tests import lockstep
from tests.capture.oracle import check
from tests.capturing import capture


class Average(nn.Module):
    """A running average, assigned anew; twice, the second time without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        with torch.no_grad():
            self.average = self.average * 2
        self.steps = self.steps + 1
        found = x / (1 + self.scale)
        self.scale = self.scale * 0.5 + found.detach().square().mean(0)  # the backward needs the old one
        return found - self.average


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.average = nn.Linear(4, 4), Average()

    def forward(self, x: Tensor) -> Tensor:
        return self.average(self.fc(x)).square().mean()


def test_assigned_buffers_are_written() -> None:
    captured = check(Net(), (torch.randn(3, 4),), None, ((torch.randn(5, 4),), {}))
    written = [s.of for s in meta(captured.gm.graph.output_node()).results if isinstance(s, Mutation)]
    assert written == [Buffer(f"average.{name}") for name in ("average", "scale", "steps")]


def test_a_shared_module_writes_its_buffer_in_place() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.detach().sum(0))
            return torch.tanh(super().forward(x))

    model = nn.Sequential(counts := Counts(), counts, nn.Flatten(0))
    captured = check(model, (torch.randn(3, 4),), None, ((torch.randn(5, 4),), {}))
    written = [s.of for s in meta(captured.gm.graph.output_node()).results if isinstance(s, Mutation)]
    assert written == [Buffer("0.seen")]


@pytest.mark.parametrize("value", [torch.ones(3), torch.zeros(4, dtype=torch.long), None])
def test_buffers_keep_their_type(value: Any) -> None:
    class Changed(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.average.average = value
            return self.fc(x).sum()

    with pytest.raises(CaptureError, match=r"type of buffer average.average, torch.float64\[4\]: it is"):
        capture(Changed(), (torch.randn(3, 4),), {})


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(4, 4), 0
        self.seen: list[Tensor] = []
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((4,), 2.0)
        self.register_buffer("late", torch.ones(4))
        self.last, self.calls = x, self.calls + 1
        self.seen.append(x)
        return (self.fc(x) * self.scale * self.late).sum()


def test_other_assignments_are_undone(caplog: pytest.LogCaptureFixture) -> None:
    model = Keeps()
    with caplog.at_level("WARNING", "fxdp"):
        capture(model, (torch.randn(3, 4),), {})
    assert (model.scale, model.calls, list(model.state_dict())) == (None, 0, ["fc.weight", "fc.bias"])
    assert model.seen == []
    assert not hasattr(model, "last")
    for said in ("sets scale of the model (Keeps) at", "`self.scale = torch", "late of the", "calls of"):
        assert said in caplog.text
    model(torch.randn(3, 4))


class Installs(nn.Module):
    """Installs a hook at its first call, as transformers does to collect the outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.installed = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.fc.register_forward_hook(lambda _module, _args, output: output * 2)
            self.installed = True
        return self.fc(x).sum()


def test_hooks_that_a_forward_installs_are_installed_once() -> None:
    model = Installs()
    for batch in (3, 5):
        captured = capture(model, (torch.randn(batch, 4),), {})
        assert not model.fc._forward_hooks
        doublings = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        assert sum(not meta(node).backward for node in doublings) == 1


BATCH = torch.Generator().manual_seed(0)


class Padded(nn.Module):
    """Sizes and switches in buffers, as transformers' codecs keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, stride=2)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("switches", torch.tensor([1.0, 0.0]))
        self.register_buffer("order", torch.arange(100))

    def forward(self, x: Tensor) -> Tensor:
        missing = torch.ceil((x.shape[-1] - 3) / self.stride).to(torch.int64) * self.stride + 3 - x.shape[-1]
        if missing > 0:
            x = F.pad(x, (0, missing))  # type: ignore[list-item]
        if self.switches[0] > 0:
            x = 2 * x
        x = x[:, self.order[:2].flip(0)]
        return self.norm(self.conv(x)).relu().square().mean()  # type: ignore[no-any-return]


class Counted(nn.Module):
    """Reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x).mean() * (2 if self.steps > 1 else 1)  # type: ignore[no-any-return]


def _x() -> Tensor:
    return torch.randn(4, 2, 8, generator=BATCH)


def test_ranks_equal_one_device() -> None:
    assert fxdp.verify(Padded(), (_x(),), mesh={"dp": 2}).ok


def test_a_buffer_with_another_value_is_captured_anew() -> None:
    model = Padded()
    compiled = fxdp.compile(model, backend="eager")
    for switches in ([1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 5.0]):
        model.switches.copy_(torch.tensor(switches))  # type: ignore[operator]
        x = _x()
        expected = model(x)
        torch.testing.assert_close(compiled(x), expected)


def test_a_buffer_that_the_forward_writes_is_no_number() -> None:
    said = r"test_module_state.py:\d+ `return .*self.steps > 1.*data-dependent"
    with pytest.raises(CaptureError, match=said):
        fxdp.compile(Counted(), backend="eager")(torch.randn(4, 2))


class Places(nn.Module):
    """A table for as many tokens as there are, made at the first call, as ConViT has one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("places", torch.zeros(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] != x.shape[1]:
            self.places = torch.arange(x.shape[1], dtype=x.dtype)[:, None].expand(-1, 4)
        return (self.fc(x) * self.places).square().mean()


def test_a_table_of_another_shape_is_made_at_each_call(caplog: pytest.LogCaptureFixture) -> None:
    model = Places()
    with caplog.at_level("WARNING", "fxdp"):
        lockstep.check(model, (torch.randn(7, 3, 4),), splits=((4, 3), (5, 2, 0, 0)))
    assert "sets places of the model (Places) at" in caplog.text
    assert model.places.shape == (1, 4)


class Grows(Places):
    """Remembers how often it was called by the size of its table."""

    def forward(self, x: Tensor) -> Tensor:
        self.places = torch.cat([self.places, self.places[:1] + 1])
        return (self.fc(x) * self.places.sum()).square().mean()


def test_a_table_that_remembers_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"from one call to the next .*places"):
        capture(Grows(), (torch.randn(7, 3, 4),), {})


class Rope:
    """No module; its table is made at the first call."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return x * self.table


class Turned(nn.Module):
    """Fixes its batch size, so that it is traced several times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ropes = nn.Linear(4, 4), [Rope()]

    def forward(self, x: Tensor) -> Tensor:
        return self.ropes[0](self.fc(x)).square().sum() / len([0] * x.shape[0])


def test_objects_that_modules_hold_keep_no_tensor_of_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    model = Turned()
    with caplog.at_level("WARNING", "fxdp"):
        lockstep.check(model, (torch.randn(7, 4),), splits=((4, 3), (5, 2, 0, 0)))
    assert "sets table of ropes of the model[0] at" in caplog.text
    assert model.ropes[0].table is None
