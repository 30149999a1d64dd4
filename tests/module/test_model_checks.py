"""Which models are refused before anything else, with the remedy."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

import fxdp
from fxdp.errors import StateError
from fxdp.module.model_checks import OptimizerWatch
from tests.rank_pool import RankPool

WAYS: list[Callable[[Any], Any]] = [
    fxdp.compile,
    lambda model: fxdp.plan(model, (torch.zeros(2, 2),)),
    lambda model: fxdp.verify(model, (torch.zeros(2, 2),)),
]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = fxdp.compile(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@pytest.mark.parametrize("way", WAYS, ids=["compile", "plan", "verify"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: torch.sin, "a builtin_function_or_method, expected a torch.nn.Module"),
        (lambda: fxdp.compile(nn.Linear(2, 2)), "the model is compiled by fxdp already"),
        (Outer, "its part 'net' is compiled by fxdp already"),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "its part '0' is a DataParallel"),
        (lambda: nn.Sequential(torch.jit.ScriptModule()), "its part '0' is a torch.jit.ScriptModule"),
    ],
)
def test_no_plain_module(way: Callable[[Any], Any], model: Callable[[], Any], words: str) -> None:
    with pytest.raises(fxdp.InputError, match=words):
        way(model())


def _wrapped() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    layer = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh))
    found = []
    for model in (DistributedDataParallel(nn.Linear(4, 4)), sharded, layer):
        try:
            fxdp.compile(model)
        except fxdp.InputError as error:
            found.append(str(error))
    return found


def test_models_that_communicate_by_themselves(ranks: RankPool) -> None:
    for ddp, sharded, layer in ranks.run(2, _wrapped):
        assert "a DistributedDataParallel, which reduces gradients itself; expected what is inside" in ddp
        for text in (sharded, layer):
            assert "FSDPLinear" in text or "DTensors (weight, bias, ...)" in text


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"dp": 4},
            "mesh={'dp': 4} has sizes|init_device_mesh('cpu', (4,), mesh_dim_names=('dp',))",
        ),
        (
            {"pp": 2},
            "mesh={'pp': 2, 'dp': 1} has|init_device_mesh('cpu', (2, 1), mesh_dim_names=('pp', 'dp'))",
        ),
    ],
)
def test_a_mesh_of_sizes_cannot_run(sizes: dict[str, int], expected: str) -> None:
    words = ".*".join(map(re.escape, expected.split("|")))
    with pytest.raises(fxdp.MeshError, match=words):
        fxdp.compile(nn.Linear(2, 2), sizes, loss_fn=nn.MSELoss())  # type: ignore[arg-type]


@pytest.fixture
def module() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def watch(module: nn.Module) -> Iterator[OptimizerWatch]:
    made = OptimizerWatch(module)
    yield made
    made._handle.remove()


def _grads(module: nn.Module) -> None:
    module(torch.ones(1, 3)).sum().backward()


def test_the_right_optimizer_ends_the_watch(module: nn.Module, watch: OptimizerWatch) -> None:
    _grads(module)
    assert not watch.remove_when_done()
    torch.optim.SGD(module.parameters()).step()
    assert watch.remove_when_done()


def test_an_optimizer_of_a_copy_is_refused(module: nn.Module, watch: OptimizerWatch) -> None:
    _grads(module)
    optimizer = torch.optim.Adam(copy.deepcopy(module).parameters())
    optimizer.zero_grad()
    with pytest.raises(
        StateError, match=r"Adam was built on 2 tensors of which none.*compiled.parameters\(\)"
    ):
        optimizer.step()


def test_another_model_of_the_same_shapes_may_train(module: nn.Module, watch: OptimizerWatch) -> None:
    twin = copy.deepcopy(module)
    _grads(twin)
    torch.optim.SGD(twin.parameters()).step()
    assert not watch.remove_when_done()


def test_an_optimizer_of_other_shapes_is_no_business(module: nn.Module, watch: OptimizerWatch) -> None:
    _grads(module)
    torch.optim.SGD(nn.Linear(5, 5).parameters()).step()
    assert not watch.remove_when_done()


def test_part_of_the_parameters_is_enough(module: nn.Module, watch: OptimizerWatch) -> None:
    _grads(module)
    torch.optim.SGD([module.bias]).step()  # type: ignore[list-item]
    assert watch.remove_when_done()


def test_nothing_to_train_is_nothing_to_watch() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert OptimizerWatch(frozen).remove_when_done()


def test_a_compiled_module_has_one_hook_and_takes_it_along(module: nn.Module) -> None:
    hooks = optimizer._global_optimizer_pre_hooks
    gc.collect()  # hooks of modules that other tests have left in cycles
    before = len(hooks)
    compiled = fxdp.compile(module, backend="eager")
    for dtype in (torch.float32, torch.float64):
        compiled.to(dtype)(torch.ones(2, 3, dtype=dtype))
        assert len(hooks) == before + 1
    module.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))  # type: ignore[assignment]
    compiled(torch.ones(2, 3, dtype=torch.float64))
    assert len(hooks) == before + 1
    del compiled
    gc.collect()
    assert len(hooks) == before


def test_a_tensor_in_the_place_of_a_parameter_is_refused() -> None:
    compiled = fxdp.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    given = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    with pytest.raises(StateError, match=r"^0.weight, 0.bias of the model .* torch.func.functional_call"):
        torch.func.functional_call(compiled, given, torch.ones(3, 2))
    assert compiled(torch.ones(3, 2)).shape == (3, 2)
