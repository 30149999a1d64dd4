"""A refusal names every line at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxdp.capture.refusals.diagnose import capture_error
from fxdp.capture.refusals.eager_probe import Read
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from tests.capturing import capture

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x * 2
        return x / float(x.abs().max())


class Reads(nn.Module):
    """Reads values on five lines, in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gates = nn.Linear(4, 4), nn.ModuleList([Gate(), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.gates[0](self.fc(x))
        if torch.equal(y, x):
            y = -y
        rows = y.sum(1).tolist()
        return self.gates[1](y) * y.sum().item() + max(rows)


def refusal(model: nn.Module, x: Tensor = X) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, (x,), {})
    return str(caught.value)


def test_all_reads_are_named_with_line_and_module() -> None:
    message = refusal(Reads())
    listed = [line.strip() for line in message.splitlines() if " of a tensor of shape " in line]
    assert len(listed) == 5
    assert "All places that read the value of a tensor (5):" in message
    for how, code, module in [
        ("bool() or if of a tensor of shape []", "`if x.mean() > 0:`", " in gates.0"),
        ("float() of a tensor of shape []", "`return x / float(x.abs().max())`", " in gates.0"),
        ("torch.equal of a tensor of shape [4, 4]", "`if torch.equal(y, x):`", ""),
        (".tolist() of a tensor of shape [4]", "`rows = y.sum(1).tolist()`", ""),
        (".item() of a tensor of shape []", "y.sum().item()", ""),
    ]:
        assert any(s.startswith(how) and code in s and s.endswith(module) for s in listed), (how, message)
    assert all("test_eager_probe.py:" in line for line in listed)


def test_the_model_and_the_random_numbers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4), Gate())
    before = [value.clone() for value in model.state_dict().values()]
    torch.manual_seed(3)
    refusal(model)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Guarded(nn.Module):
    """As transformers does it: a check that only eager code makes is no reason to refuse."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.min() < -1e9:
            raise ValueError
        return x * x.sum().item() if x.sum() > 0 else x


def test_what_runs_in_eager_mode_only_is_not_named() -> None:
    message = refusal(Guarded())
    assert "min()" not in message
    assert "x.sum() > 0" in message


class ForwardBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, x.shape[0] // 2, 4).sum(0)


def test_code_for_some_batch_sizes_only() -> None:
    message = refusal(ForwardBackward())
    assert (
        "`return x.view(2, x.shape[0] // 2, 4).sum(0)`: the model runs at a batch of 4, but not of 3"
        in message
    )
    assert "say so with batch_dims=fxdp.RowsPerSample(2)" in message


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()) * 2


def test_other_faults_are_not_taken_for_the_batch() -> None:
    message = refusal(Numpy())
    assert "but not of" not in message
    assert (
        "All places that read the value of a tensor (1):\n  .numpy() of a tensor of shape [4, 4]" in message
    )


def test_a_model_that_fails_by_itself_shows_its_own_error() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                raise ValueError("always")
            raise ValueError("always")

    assert "always" in refusal(Wrong())


class LayerDrop(nn.Module):
    """Skips its layer now and then, as transformers' models do."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layer, self.probability = nn.Linear(4, 4), probability

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        if drawn < self.probability:
            return x
        return self.layer(x)


def test_a_decision_by_a_random_number_has_its_own_remedy() -> None:
    assert "`if drawn < self.probability:`: data-dependent" in (message := refusal(LayerDrop(0.1)))
    assert "Switch off what draws it (layerdrop=0)" in message


def test_an_error_without_a_line_has_that_of_the_first_read() -> None:
    reads = [Read(".tolist()", "a tensor of shape [2]", Location("model.py", line)) for line in (3, 7)]
    error = capture_error(RuntimeError("Could not guard on data-dependent expression"), reads=reads)
    assert str(error).startswith("at model.py:3: data-dependent control flow")
