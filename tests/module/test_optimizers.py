from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import optimizer

import fxdp
from fxdp.errors import StateError
from fxdp.module.optimizers import OptimizerWatch


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
    before = len(hooks)
    compiled = fxdp.compile(module, compute="eager")
    for dtype in (torch.float32, torch.float64):
        compiled.to(dtype)(torch.ones(2, 3, dtype=dtype))
        assert len(hooks) == before + 1
    module.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))  # type: ignore[assignment]
    compiled(torch.ones(2, 3, dtype=torch.float64))
    assert len(hooks) == before + 1
    del compiled
    gc.collect()
    assert len(hooks) == before
