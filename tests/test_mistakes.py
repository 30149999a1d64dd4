"""Mistakes of users, a row each: refused where they are made, with words, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.errors import FxdpError, InputError, MeshError, StateError
from fxdp.options import Options
from fxdp.settings import Settings
from fxdp.skip import inspect_skip_layout, pop, skippable, stash, verify_skippables

_X = torch.randn(6, 4)
_RELU = torch.ops.aten.relu.default


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def _plan(model: nn.Module | None = None, x: Any = _X, **options: Any) -> Any:
    return fxdp.plan(_net() if model is None else model, (x,), **options)


def _verify(**options: Any) -> Any:
    return fxdp.verify(_net(), (_X,), mesh={"dp": 2}, **options)


def _call(x: Any) -> Any:
    return fxdp.compile(_net(), backend="eager")(x)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("strict",) for value in ("no", 1, None)),
        *(("reshard_after_forward", value) for value in ("no", 0, -2, 1.5, None)),
        *(("batch_dims", value) for value in (True, (True,), 1.5, "0", {"x": True})),
        *(("pad", value) for value in ("x", object(), [object()])),
        *(("rng", value) for value in (3, None, [], "sharde")),
    ],
)  # fmt: skip
def test_options(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name) as caught:
        Options(**{name: value})
    assert "expected" in str(caught.value) or "is no folder" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_to_gather_among_some_ranks_these_must_divide_all() -> None:
    words = r"reshard_after_forward=4, but .* over 6 ranks; expected a divisor of that, \[1, 2, 3, 6\]"
    with pytest.raises(MeshError, match=words):
        _plan(strategy="shard", mesh={"dp_shard": 6}, reshard_after_forward=4)
    _plan(strategy="shard", mesh={"dp_shard": 1}, reshard_after_forward=4)  # nothing is gathered


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"dump_dir is '.*file/x/y', which cannot be made"):
        _plan(debug={"dump_dir": tmp_path / "file" / "x" / "y"})


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"dp": 10**30}, "more than 1,048,576 ranks"),
        ({"dp": 1025, "pp": 1024}, "more than 1,048,576 ranks"),
        ({1: 2}, r"got \[1\], expected names"),
        ({None: 2}, r"got \[None\], expected names"),
        ({"dp": True}, "dp=True; expected integers"),
        ({"dp": 0}, "dp=0; expected integers"),
    ],
)
def test_meshes(mesh: Any, words: str) -> None:
    with pytest.raises(MeshError, match=words):
        _plan(mesh=mesh)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"tolerance": value}, "tolerance is") for value in ("x", -1, math.nan, math.inf, True)),
        *(({"splits": value}, "splits=") for value in (6, [None], [[1.5] * 4], [[3, 3.0]], "33", [[-1, 7]])),
        *(({"seed": value}, "seed is") for value in ("a", None, 2**80, 1.5, True)),
    ],
)
def test_verify(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        _verify(**options)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: fxdp.register_rule(_RELU, labels=3), "got labels=3"),
        (lambda: fxdp.register_rule(_RELU, linear_in="xy"), "linear_in='xy' is one text"),
        (lambda: fxdp.register_rule(_RELU)(3), "got 3 as a rule"),
        (lambda: fxdp.check_rule(_RELU), "take these arguments: .* missing value for argument 'self'"),
        (lambda: fxdp.check_rule(_RELU, 3), "does not take these arguments"),
    ],
)
def test_rules(act: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        act()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (nn.LazyLinear, "weight, bias of the model have no shape yet"),
        (lambda n: torch.jit.script(nn.Linear(4, n)), "the model is a torch.jit.ScriptModule"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models(made: Callable[[int], nn.Module], words: str) -> None:
    for door in (_plan, fxdp.compile):
        with pytest.raises(InputError, match=words):
            door(made(3))


@pytest.mark.parametrize("door", [lambda x: _plan(x=x), _call])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (_X.to_sparse(), "input: a sparse tensor; expected a dense one"),
        (_X.double(), r"float32, float64 at .*test_mistakes.py.* in 0\n(.|\n)*The inputs are input float64"),
        (_X > 0, r"float32, bool at .*\n(.|\n)*The inputs are input bool\. Expected one dtype"),
    ],
)
def test_inputs(door: Callable[[Tensor], Any], x: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        door(x)


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)])
def test_batch_norm_of_one_value_per_channel(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4) if len(shape) == 1 else nn.BatchNorm2d(4))
    compiled, x = fxdp.compile(model, backend="eager"), torch.randn(3, *shape)
    compiled(x)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        model(x[:1])
    with pytest.raises(InputError, match="Expected more than 1 value per channel when training, got"):
        compiled(x[:1])
    compiled(x)
    model.eval()
    torch.testing.assert_close(compiled(x[:1]), model(x[:1]))


class _ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.weight).sum(), self.weight


def test_a_parameter_that_is_returned_has_its_gradient() -> None:
    model = _ReturnsParameter()
    gradients = []
    for run in (model, fxdp.compile(model, backend="eager")):
        loss, weight = run(_X)
        gradients.append(torch.autograd.grad(loss + weight.square().sum(), model.weight)[0])
    torch.testing.assert_close(*gradients)


def _differentiated_twice(compiled: Any) -> None:
    x = _X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    gradient.sum().backward()


@pytest.fixture(scope="module")
def compiled() -> Any:
    found = fxdp.compile(_net(), backend="eager")
    found(_X)
    return found


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda c: torch.vmap(c)(torch.randn(2, 6, 4)), r"inside of torch\.func \(vmap\)"),
        (lambda c: torch.func.grad(lambda x: c(x).sum())(_X), r"inside of torch\.func \(grad\)"),
        (lambda c: torch.func.jvp(c, (_X,), (_X,)), r"inside of torch\.func \(jvp\)"),
        (lambda c: torch.export.export(c, (_X,)), r"inside of torch\.export or torch\.compile"),
        (lambda c: torch.jit.trace(c, (_X,)), r"inside of torch\.jit\.trace"),
        (_differentiated_twice, "has first derivatives only"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_transforms_of_a_compiled_module(compiled: Any, transform: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        transform(compiled)


@pytest.mark.filterwarnings("ignore")
def test_scripting_a_compiled_module(compiled: Any) -> None:
    with pytest.raises(InputError, match=r"torch\.jit\.script\(compiled\)"):
        torch.jit.script(compiled)


_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WORLD_SIZE", value) for value in ("0", "1.5", "-2", "9" * 5000, "two")),
        *(("RANK", value) for value in ("2", "-1", "1.0", "x")),
        *(("MASTER_PORT", value) for value in ("0", "99999", "http")),
        ("LOCAL_RANK", "1.5"),
        *(("FXDP_TIMEOUT_S", value) for value in ("inf", "nan", "1e30", "-1", "soon")),
        ("FXDP_SHARED_MEMORY", "no"),
    ],
)
def test_environment(name: str, value: str) -> None:
    with pytest.raises(MeshError, match=f"environment variable {name} is"):
        Settings.from_environment({**_TORCHRUN, name: value})


class _Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: skippable(stash=None)(_Same), "stash=None is no list of names"),  # type: ignore[arg-type]
        (lambda: skippable(pop=3)(_Same), "pop=3 is no list of names"),  # type: ignore[arg-type]
        (lambda: skippable(pop=[None])(_Same), "names, which are strings, got None"),  # type: ignore[list-item]
        (lambda: verify_skippables(None), "takes a model, which is a module, got a NoneType"),  # type: ignore[arg-type]
        (lambda: verify_skippables([_Same()]), "got a list"),  # type: ignore[arg-type]
        (lambda: inspect_skip_layout(None), "takes a list of modules, got None"),  # type: ignore[arg-type]
    ],
)
def test_skips(act: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        act()


@skippable(stash=["kept"])
class _Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class _Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        kept = yield pop("kept")
        return x + kept


def test_what_one_model_stashed_no_other_one_pops() -> None:
    nn.Sequential(_Stash())(_X)
    with pytest.raises(RuntimeError, match="'kept' has not been stashed"):
        nn.Sequential(_Pop())(_X)
    assert torch.equal(nn.Sequential(_Stash(), _Pop())(_X), 2 * _X)
    _Stash()(_X)  # by hand, it is for whoever pops it
    assert torch.equal(_Pop()(_X), 2 * _X)


def test_all_are_errors_of_fxdp() -> None:
    assert issubclass(InputError, FxdpError)
    assert issubclass(InputError, ValueError)


def test_good_ones_are_taken(tmp_path: Path) -> None:
    Options(
        debug={"dump_dir": tmp_path / "new"},
        pad=(0, {"y": -100}),
        batch_dims=(0, None),
        pipeline={"microbatches": 4096},
    )
    Options(pad=math.nan, pipeline={"stages": ("a", "b")}, debug={"check_replicas": 0}, loss_fn=F.mse_loss)
    assert Settings.from_environment(_TORCHRUN).launch is not None
