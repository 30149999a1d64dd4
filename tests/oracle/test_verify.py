"""`fxdp.verify`: what it reports, on models that are right and models that it must refuse."""

from __future__ import annotations

import io
import json
import math
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import fxdp
from fxdp.capture.captured import Captured
from fxdp.errors import CaptureError, ExactnessError, InputError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Buffer, Mutation
from fxdp.oracle import verified_capture
from fxdp.oracle.splits import default_splits


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


def verify(model: nn.Module, *args: Tensor, **options: Any) -> fxdp.Report:
    return fxdp.verify(model, args, mesh=options.pop("mesh", {"dp": 4}), **options)


def test_a_training_step() -> None:
    """Outputs, gradients and buffers of a float32 model, checked in float64."""
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fxdp.verify(model, (X,), {"target": Y}, {"dp": 4}, loss_fn=F.cross_entropy)
    assert report.ok
    report.raise_if_wrong()
    assert report.first_fault is None
    assert 0 < report.worst <= 1e-9
    assert [run.split for run in report.splits] == [(2, 2, 2, 2), (5, 2, 0, 1), (0, 0, 0, 8)]
    results = {row.result for row in report.splits[0].results}
    assert {"output 0", "gradient of 0.weight", "buffer 1.running_mean"} <= results
    assert all(row.tolerance == 1e-9 for run in report.splits for row in run.results)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_old_gradients_and_the_users_random_numbers_do_not_count() -> None:
    model = mlp()
    model(X).sum().backward()
    torch.manual_seed(5)
    report = verify(model, X, splits=[8, 0], mesh={"dp": 2})
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert report.ok
    assert torch.equal(drawn, torch.rand(3))


def test_the_report_is_read_by_people_and_programs() -> None:
    report = verify(mlp(), X)
    text = str(report)
    assert text.startswith("Sequential on mesh(dp=4) equals one device: largest relative error ")
    assert "split [5, 2, 0, 1]: equal" in text
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    assert "[5, 2, 0, 1]" in console.export_text()
    found = json.loads(json.dumps(report.as_dict()))
    assert found["ok"] is True
    assert [run["split"] for run in found["splits"]] == [[2, 2, 2, 2], [5, 2, 0, 1], [0, 0, 0, 8]]
    assert not math.isnan(found["worst"])


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(self.fc(x))
        return y.square().mean(), y + F.dropout(torch.ones(64))


def test_random_numbers_of_one_device_are_eagers() -> None:
    report = verify(Dropped(), X, rng="single-device")
    assert report.ok
    assert (
        report.compared
        == "in float64; every node, output, gradient and buffer is compared with one eager device"
    )


def test_sharded_random_numbers_are_given_to_the_reference() -> None:
    report = verify(Dropped(), X)
    assert report.ok
    assert "the ranks draw random numbers of their own" in report.compared
    assert report.splits[0].results, "eager is compared with the captured program"


class Casts(nn.Module):
    """Computes its norm in float32, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y.square().mean(), y.float().pow(2).mean().to(x.dtype)


def test_casts_inside_the_model_are_named_and_count_1e_6() -> None:
    report = verify(Casts(), X, mesh={"dp": 2})
    assert report.ok
    (location,) = report.casts
    assert "y.float().pow(2)" in location.code
    allowed = {row.result: row.tolerance for row in report.splits[0].results}
    assert (allowed["output 0"], allowed["output 1"]) == (1e-9, 1e-6)
    assert "1e-6 is equal there" in str(report)


class Float32Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ torch.ones(4, 4, dtype=torch.float32)


def test_a_model_with_types_of_its_own_is_checked_as_it_is() -> None:
    report = verify(Float32Only(), X, mesh={"dp": 2})
    assert report.ok
    assert "in the model's own types, because it fails in float64" in report.compared
    assert report.splits[0].results[0].tolerance == 1e-5, "a model's own float32, not one cast on the way"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-9)]
)
def test_a_models_own_precision(dtype: torch.dtype, tolerance: float) -> None:
    report = verify(mlp().to(dtype), X.to(dtype), precision="own")
    assert report.ok, str(report)
    assert report.splits[0].results[0].tolerance == tolerance


def test_eight_ranks_without_gradients() -> None:
    with torch.no_grad():
        report = verify(mlp().eval(), X, mesh={"dp_replicate": 8})
    assert report.ok
    assert {row.result for run in report.splits for row in run.results} == {"output 0"}


BEGIN = time.perf_counter()


class Weird(nn.Module):
    """What eager computes depends on the time: it cannot be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (time.perf_counter() - BEGIN)


def test_results_that_differ_from_eager_are_an_error() -> None:
    """Every node equals the captured program, which is not what the model does."""
    report = verify(Weird(), X)
    assert not report.ok
    assert report.first_fault is None
    assert {row.result for row in report.wrong_results} == {
        "output 0", "gradient of fc.weight", "gradient of fc.bias",
    }  # fmt: skip
    with pytest.raises(ExactnessError, match=r"(?s)differs from one device.*output 0 differs.*please report"):
        report.raise_if_wrong()
    assert json.loads(json.dumps(report.as_dict()))["ok"] is False


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean() if x.shape[0] > 5 else self.fc(x).sum()


class Policy(nn.Module):
    """A policy's first loss: advantages normalized in groups add up to nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        logp = self.fc(x).log_softmax(-1)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        return -((logp - logp.detach()).exp() * advantages).mean()


def test_a_loss_that_cancels_counts_against_its_terms() -> None:
    report = verify(Policy(), torch.randn(8, 4), torch.randn(8, 3))
    assert report.ok, report


class _Scaled(nn.Module):
    """The scale of a cosine's operand, its only parameter: the gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(x * self.scale, y)


def test_a_gradient_that_cancels_counts_against_its_terms() -> None:
    report = verify(_Scaled(), torch.randn(8, 5), torch.randn(8, 5))
    assert report.ok, report


def test_a_branch_on_the_batch_is_taken_as_the_batch_takes_it() -> None:
    assert verify(Branches(), X[:4]).ok
    assert verify(Branches(), X).ok
    with pytest.raises(InputError, match=r"(?s)decided on a size.*global batch of 3.*x.shape\[0\] > 5"):
        verify(Branches(), X, splits=[(1, 2, 0, 0)])


@pytest.mark.parametrize(
    ("batch", "world", "splits"),
    [
        (8, 4, ((2, 2, 2, 2), (5, 2, 0, 1), (0, 0, 0, 8))),
        (8, 2, ((4, 4), (7, 1), (0, 8))),
        (1, 4, ((1, 0, 0, 0), (0, 0, 0, 1))),
        (7, 3, ((3, 2, 2), (6, 0, 1), (0, 0, 7))),
        (5, 1, ((5,),)),
        (3, 8, ((1, 1, 1, 0, 0, 0, 0, 0), (2, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 3))),
    ],
)
def test_default_splits(batch: int, world: int, splits: tuple[tuple[int, ...], ...]) -> None:
    assert default_splits(batch, world) == splits
    assert all(sum(split) == batch and len(split) == world for split in splits)


@pytest.mark.parametrize("splits", [[3, 5], [[2, 2, 2, 3]], [[9, -1, 0, 0]], [], [[0, 0, 0, 0]]])
def test_splits_that_do_not_fit(splits: Any) -> None:
    with pytest.raises(InputError, match=r"splits=.*each of 4 parts .* with 1 to 8 samples"):
        verify(mlp(), X, splits=splits)


def test_mistakes() -> None:
    with pytest.raises(InputError, match="precision is 'float16', expected 'float64'"):
        verify(mlp(), X, precision="float16")
    with pytest.raises(InputError, match="batch sizes differ"):
        fxdp.verify(mlp(), (X,), {"target": Y[:3]}, loss_fn=F.cross_entropy)
    with pytest.raises(CaptureError, match="the model itself fails on these inputs"):
        verify(mlp(), X[:, :3])
    with pytest.raises(fxdp.MeshError, match="tp"):
        verify(mlp(), X, mesh={"tp": 2})


@pytest.mark.parametrize("ask", [fxdp.verify, fxdp.plan])
def test_arguments_that_are_no_tuple(ask: Any) -> None:
    with pytest.raises(InputError, match=r"args is a tensor of shape \(8, 4\), .* write \(x,\)"):
        ask(mlp(), X)
    with pytest.raises(InputError, match=r"args is a dict, expected a tuple"):
        ask(mlp(), {"input": X})
    with pytest.raises(InputError, match=r"kwargs is a tensor of shape \(8,\), expected a dict"):
        ask(mlp(), (X,), Y)


@pytest.mark.parametrize(("mesh", "microbatches"), [({"pp": 2, "dp": 2}, 1), ({"dp": 2}, 2)])
def test_of_a_pipeline_it_says_what_was_run(mesh: dict[str, int], microbatches: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    report = fxdp.verify(
        model, (X,), {"target": Y}, mesh, loss_fn=F.cross_entropy, pipeline={"microbatches": microbatches}
    )
    assert report.ok
    assert [len(run.split) for run in report.splits] == [2, 2, 2]
    assert report.mesh == f"mesh({', '.join(f'{name}={size}' for name, size in mesh.items())})"
    assert "before it is cut into stages and micro-batches" in report.compared


def test_a_write_of_a_buffer_that_the_program_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    captured_as_it_is = verified_capture.capture_request

    def without_running_mean(*args: Any, **kwargs: Any) -> Captured:
        found = captured_as_it_is(*args, **kwargs)
        output = found.gm.graph.output_node()
        values: Any = output.args[0]
        rows = zip(meta(output).results, values, strict=True)
        kept = [(spec, v) for spec, v in rows if spec != Mutation(Buffer("1.running_mean"))]
        meta(output).results = tuple(spec for spec, _ in kept)
        output.args = (tuple(v for _, v in kept),)
        return found

    monkeypatch.setattr(verified_capture, "capture_request", without_running_mean)
    report = verify(mlp(), X)
    wrong = {str(row) for run in report.splits for row in run.wrong}
    assert wrong == {"buffer 1.running_mean is missing"}


class _ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale


def test_a_parameter_may_be_returned_as_it_is() -> None:
    report = verify(_ReturnsParameter(), X)
    assert report.ok, report
