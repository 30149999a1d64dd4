"""Bad input: a clear error on every rank, nothing lost, no hang; the next good call works where it can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
import fxdp.ranks.liveness.liveness
from tests.limits import SOON_S, scaled
from tests.rank_pool import RankPool


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks_afterwards(ranks: RankPool) -> Iterator[None]:
    """gloo's threads may outlive a group that was broken on purpose: later tests get other processes."""
    yield
    ranks.renew()


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.fc = nn.Linear(6, width)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.fc(x)
        return out.square().mean() if y is None else F.mse_loss(out, y)


def _compiled(model: nn.Module | None = None, **options: Any) -> fxdp.CompiledModule:
    return fxdp.compile(model or Net(), backend="eager", **options)


def _error(action: Callable[[], Any]) -> str:
    """The message of the FxdpError that an action must raise."""
    try:
        action()
    except fxdp.FxdpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _works(compiled: fxdp.CompiledModule) -> bool:
    """A good step after the refused call."""
    loss = compiled(torch.randn(3, 6))
    loss.backward()
    return bool(torch.isfinite(loss)) and compiled.fc.weight.grad is not None


Cases = dict[str, tuple[str, bool]]


def _refused_calls() -> Cases:
    """What each rank says; every call is refused on all ranks, and the next good one works."""
    rank = dist.get_rank()
    compiled = _compiled()
    x, one = torch.randn(3, 6), rank == 1
    calls: dict[str, Callable[[], Any]] = {
        "batch sizes differ": lambda: compiled(x, torch.randn(2 if one else 3, 6)),
        "dtype differs": lambda: compiled(x.double() if one else x),
        "sample shape differs": lambda: compiled(torch.randn(3, 5 if one else 6)),
        "dims differ": lambda: compiled(torch.randn(3, 4, 6) if one else x),
        "structure differs": lambda: compiled(x, x) if one else compiled(x),
        "wrong device": lambda: compiled(x.to("meta") if one else x),
        "mode differs": lambda: compiled.train(not one)(x),
        "everybody has an empty batch": lambda: compiled(torch.randn(0, 6)),
        "not a value": lambda: compiled(x, {1, 2} if one else None),
    }
    found: Cases = {}
    for name, call in calls.items():
        message = _error(call)
        compiled.train()
        compiled.zero_grad()
        found[name] = (message, _works(compiled))
    return found


class Squeezing(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.fc(x).squeeze().square().mean(-1).sum()


def _batch_size_one_rng() -> tuple[str, bool]:
    compiled = _compiled(Squeezing())
    message = _error(lambda: compiled(torch.randn(1 - dist.get_rank(), 6)))
    return message, _works(compiled)


def test_a_batch_of_one_sample_is_not_squeezed_in_part(ranks: RankPool) -> None:
    """One device would drop the batch dim; a rank that holds no sample could not."""
    for message, works in ranks.run(2, _batch_size_one_rng):
        assert "InputError" in message
        assert "global batch is 1" in message
        assert "self.fc(x).squeeze()" in message
        assert works


EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "batch sizes differ": (["x: 3", "y: 2", "batch_dims="], ["rank 1", "y: 2"]),
    "dtype differs": (["float64", "float32", "rank 1"], ["float64", "float32", "rank 1"]),
    "sample shape differs": (["5", "6", "rank 1"], ["5", "6", "rank 1"]),
    "dims differ": (["rank 1"], ["rank 1"]),
    "structure differs": (["rank 1"], ["rank 1"]),
    "wrong device": (["meta", "cpu", ".to("], ["rank 1", "meta"]),
    "mode differs": (["rank 1"], ["rank 1"]),
    "everybody has an empty batch": (["global batch is empty"], ["global batch is empty"]),
    "not a value": (["set"], ["rank 1", "set"]),
}
"""Words on the rank at fault (1), and on the other."""


def test_refused_calls_say_who_and_what_and_the_next_call_works(ranks: RankPool) -> None:
    found = ranks.run(2, _refused_calls)
    for name, (own, other) in EXPECTED.items():
        for rank, words in ((1, own), (0, other)):
            message, works = found[rank][name]
            assert message.split(":")[0].endswith("Error"), (name, rank, message)
            for word in words:
                assert word in message, f"{name}, rank {rank}: {word!r} is not in: {message}"
            assert works, f"{name}: rank {rank} does not work afterwards"


# ---- models that cannot be captured ----


class Branch(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.fc(x).mean() if x.sum() > 0 else self.fc(x).sum()


class Penalty(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x.requires_grad_()
        self.fc(x).sum().backward()
        return (self.fc(x).sum(1, keepdim=True) * x.grad).mean()


class Numpy(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.fc(x).mean() * float(x.detach().numpy().mean())


class ForwardBackward(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.fc(x.view(2, x.shape[0] // 2, 6)).mean()


class Raises(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        raise ValueError("temperature must be positive")


MODELS: dict[type[nn.Module], list[str]] = {
    Branch: ["data-dependent", "if x.sum() > 0", "torch.where", "test_bad_input.py"],
    Penalty: ["self.fc(x).sum().backward()", "torch.autograd.grad(y, x", "test_bad_input.py"],
    Numpy: ["test_bad_input.py", "numpy"],
    ForwardBackward: ["x.view(2, x.shape[0] // 2, 6)", "test_bad_input.py"],
    Raises: ["temperature must be positive", "raise ValueError"],
}


def _refused_models() -> dict[str, str]:
    found = {}
    for model in MODELS:
        compiled = _compiled(model())
        found[model.__name__] = _error(lambda compiled=compiled: compiled(torch.randn(4, 6)))
    found["loss without target"] = _error(lambda: _compiled(loss_fn=F.mse_loss)(torch.randn(4, 6)))
    for name, loss_fn in (("vector", lambda o, t: o - t), ("number", lambda o, t: 3.0)):
        compiled = _compiled(nn.Linear(6, 6), loss_fn=loss_fn)
        found[name] = _error(lambda c=compiled: c(torch.randn(4, 6), target=torch.randn(4, 6)))
    found["afterwards"] = str(_works(_compiled()))
    return found


def test_models_that_cannot_be_captured(ranks: RankPool) -> None:
    expected = {model.__name__: words for model, words in MODELS.items()}
    expected |= {
        "loss without target": ["target="],
        "vector": ["loss_fn", "scalar"],
        "number": ["loss_fn", "scalar", "3.0"],
        "afterwards": ["True"],
    }
    for found in ranks.run(2, _refused_models):
        for name, words in expected.items():
            for word in words:
                assert word in found[name], f"{name}: {word!r} is not in: {found[name]}"


# ---- meshes, options, ranks that differ ----


def _meshes() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    unnamed = init_device_mesh("cpu", (2,))
    good = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = {
        "axis": _error(lambda: _compiled(mesh=mesh)),
        "unnamed": _error(lambda: _compiled(mesh=unnamed)),
        "device": _error(lambda: _compiled(Net().to("meta"), mesh=good)),
        "kind": _error(lambda: _compiled(mesh=3)),
        "sizes": _error(lambda: _compiled(mesh={"dp": 0})),
        "option": _error(lambda: _compiled(strategy="magic", communication={"bucket_cap_mb": -1})),
    }
    found["afterwards"] = str(_works(_compiled(mesh=good)))
    return found


def test_meshes_and_options(ranks: RankPool) -> None:
    words = {
        "axis": ["MeshError", "data", "'dp'"],
        "unnamed": ["MeshError", "mesh_dim_names"],
        "device": ["InputError", "meta", "strategy='shard'"],
        "kind": ["MeshError", "DeviceMesh"],
        "sizes": ["MeshError", "dp=0"],
        "option": ["InputError", "magic", "replicate", "bucket_cap_mb"],
        "afterwards": ["True"],
    }
    for found in ranks.run(2, _meshes):
        for name, expected in words.items():
            assert all(word in found[name] for word in expected), (name, found[name])


def _different_ranks() -> dict[str, str]:
    one = dist.get_rank() == 1
    x = torch.randn(3, 6)

    def call(model: nn.Module, **options: Any) -> str:
        return _error(lambda: _compiled(model, **options)(x))

    class Doubled(Net):
        factor = 3.0 if one else 2.0

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return self.fc(x).mean() * self.factor

    class Other(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            out = self.fc(x)
            return out.exp().mean() if one else out.sin().mean()

    other = Net()
    if one:
        other.double()
    weighted = _compiled(nn.Linear(6, 6), loss_fn=nn.CrossEntropyLoss(torch.ones(6) + one))
    frozen = Net()
    frozen.fc.bias.requires_grad_(not one)
    return {
        "model": call(Net(5 if one else 6)),
        "parameter dtype": call(other),
        "frozen": call(frozen),
        "option": call(Net(), communication={"bucket_cap_mb": 1.0 if one else 2.0}),
        "class": call(nn.Sequential(nn.Linear(6, 6)) if one else Net()),
        "constant": call(Doubled()),
        "program": call(Other()),
        "loss": call(nn.Linear(6, 6), loss_fn=F.mse_loss if one else F.l1_loss),
        "loss's weights": _error(lambda: weighted(x, target=torch.tensor([0, 1, 2]))),
        "uneven": _error(lambda: _compiled(communication={"uneven": False})(torch.randn(2 if one else 3, 6))),
        "afterwards": str(_works(_compiled())),
    }


def test_ranks_that_are_given_different_things(ranks: RankPool) -> None:
    words = {
        "model": ["AgreementError", "fc.weight", "[5, 6]", "[6, 6]", "rank 1"],
        "parameter dtype": ["AgreementError", "float64", "rank 1"],
        "frozen": ["AgreementError", "fc.bias", "frozen"],
        "option": ["AgreementError", "bucket_cap_mb=1.0", "bucket_cap_mb=2.0"],
        "class": ["AgreementError", "Sequential", "Net"],
        "constant": ["AgreementError", "rank 1"],
        "program": ["AgreementError", "exp", "sin", "rank 1"],
        "loss": ["AgreementError", "mse_loss", "l1_loss"],
        "loss's weights": ["AgreementError", "loss_fn.weight float32[6]", "rank 1"],
        "uneven": ["InputError", "uneven=False", "(3, 2)"],
        "afterwards": ["True"],
    }
    for found in ranks.run(2, _different_ranks):
        for name, expected in words.items():
            assert all(word in found[name] for word in expected), (name, found[name])


def _refused_without_exchange() -> list[str]:
    """With uneven=False nobody asks how large the others' batches are: rank 0 cannot take its input."""
    compiled = _compiled(communication={"uneven": False})
    compiled(torch.randn(3, 6)).backward()
    dist.barrier()  # else rank 0 may fail while rank 1 is still in this step

    def step() -> None:
        bad = [torch.randn(3, 6), torch.randn(2, 6)] if dist.get_rank() == 0 else [torch.randn(3, 6)]
        compiled(*bad).backward()

    def next_step() -> None:
        compiled(torch.randn(3, 6)).backward()

    return [_error(step), _error(next_step)]


def test_an_error_that_only_one_rank_sees_is_never_paired_with_another_step(ranks: RankPool) -> None:
    (first, after), (told, later) = ranks.run(2, _refused_without_exchange)
    assert "batch sizes differ" in first
    for text in (after, told, later):
        assert "Error" in text
        assert "batch sizes differ" in text


def _no_group() -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
    return _error(lambda: _compiled(mesh=mesh))


def test_no_process_group(ranks: RankPool) -> None:
    (outcome,) = ranks.spawn(1, _no_group, init=False)
    assert "MeshError" in outcome.result
    assert "torchrun" in outcome.result
    assert "no process group" in outcome.result


# ---- optimizers, second backwards, the end ----


def _loops() -> dict[str, str]:
    x = torch.randn(3, 6)
    model = Net()
    compiled = _compiled(model)
    optimizer = torch.optim.SGD(Net().parameters(), 0.1)
    compiled(x).backward()
    found = {"optimizer": _error(optimizer.step)}
    good = torch.optim.SGD(compiled.parameters(), 0.1)
    compiled(x).backward()
    good.step()

    loss = compiled(x)
    loss.backward()
    found["twice"] = _message(loss.backward)
    inputs = torch.randn(3, 6, requires_grad=True)
    outside = compiled(inputs)
    (grad,) = torch.autograd.grad(outside, inputs, create_graph=True)
    found["penalty outside"] = _error(lambda: (outside + grad.square().sum()).backward())
    first = torch.autograd.grad(compiled(inputs), inputs, create_graph=True)[0]
    found["create_graph alone"] = _error(lambda: first.detach().sum())
    found["works"] = str(_works(compiled))
    found["plan too early"] = _error(lambda: _compiled().plan)
    dist.destroy_process_group()
    found["destroyed"] = _error(lambda: compiled(x))
    return found


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_wrong_loops(ranks: RankPool) -> None:
    words = {
        "optimizer": ["StateError", "SGD", "compiled.parameters()"],
        "twice": ["second time"],
        "penalty outside": ["StateError", "create_graph=True", "gradient penalty"],
        "create_graph alone": ["no error"],
        "works": ["True"],
        "plan too early": ["StateError", "call the module once"],
        "destroyed": ["StateError", "process group was destroyed"],
    }
    for found in ranks.run(2, _loops):
        for name, expected in words.items():
            assert all(word in found[name] for word in expected), (name, found[name])


# ---- a rank that raises or dies ----


class Bomb(torch.autograd.Function):
    """Raises in the user's own backward, outside of the compiled module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a bad gradient")


def _stops(how: str) -> str:
    one = dist.get_rank() == 1
    fxdp.ranks.liveness.liveness._CAUSE_S = scaled(1.0)  # no rank says why: none waits long for it
    compiled = _compiled()
    optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
    for step in range(40):
        if one and step == 3:
            if how == "raises between calls":
                raise LookupError("no more data here")
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "leaves":
                return "left"
        loss = compiled(torch.randn(3, 6))
        if one and step == 3 and how == "raises in the backward":
            loss = Bomb.apply(loss)
        if one and step == 3 and how == "skips the backward":
            continue
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
    return "done"


STOPS = {
    "raises between calls": ["LookupError", "no more data here"],
    "raises in the backward": ["ArithmeticError", "a bad gradient"],
    "is killed": ["rank 1 ended without an error message"],
    "leaves": ["rank 1 ended its process"],
}


@pytest.mark.parametrize("how", STOPS)
def test_the_others_stop_with_the_cause(ranks: RankPool, how: str) -> None:
    outcomes = ranks.spawn(4, _stops, how)
    for rank in (0, 2, 3):
        outcome = outcomes[rank]
        assert outcome.status == 1, (rank, outcome)
        assert outcome.seconds < SOON_S, "stopped by its own"
        assert "RankFailedError" in outcome.output, (rank, outcome.output)
        for word in ("rank 1", *STOPS[how]):
            assert word in outcome.output, (rank, word, outcome.output)
