"""What must not be put around a compiled module is refused at once, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxdp
from fxdp.errors import StateError


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "torch.compile": lambda module: torch.compile(module, backend="eager")(torch.randn(2, 3)),
    "compile()": lambda module: module.compile(),
    "FSDPState": fully_shard,
    "_ReplicateState": replicate,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_refused_at_once(name: str) -> None:
    model = nn.Linear(3, 3)
    compiled = fxdp.compile(model, backend="eager")
    with pytest.raises(fxdp.InputError, match="call the compiled module itself") as caught:
        WRAPPERS[name](compiled)
    assert name in str(caught.value)
    assert type(model.weight) is nn.Parameter  # nothing was changed
    assert compiled(torch.randn(2, 3)).shape == (2, 3)


class Around(nn.Module):
    """A model of which a part is compiled."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def test_ddp_around_a_part_is_refused_at_the_call() -> None:
    compiled = fxdp.compile(nn.Linear(3, 3), backend="eager")
    wrapped = DistributedDataParallel(Around(compiled))
    with pytest.raises(fxdp.InputError, match=r"DistributedDataParallel\(Around\)"):
        wrapped(torch.randn(2, 3))


def test_ddp_may_run_beside_what_it_does_not_reduce() -> None:
    teacher = fxdp.compile(nn.Linear(3, 3).requires_grad_(False), backend="eager")
    wrapped = DistributedDataParallel(Around(teacher))
    assert wrapped(torch.randn(2, 3)).shape == (2, 1)


def test_hooks_of_users_are_welcome() -> None:
    seen: list[Any] = []
    compiled = fxdp.compile(nn.Linear(3, 3), backend="eager")
    compiled.register_forward_pre_hook(lambda module, args: seen.append(args))
    compiled(torch.ones(2, 3))
    assert seen[0][0].sum() == 6


def test_nothing_is_compiled_inside_of_a_transform() -> None:
    def compiled_anew(x: Tensor) -> Tensor:
        return fxdp.compile(nn.Linear(2, 1))(x).sum()

    with pytest.raises(StateError, match=r"was made inside of torch\.func \(grad\)"):
        torch.func.grad(compiled_anew)(torch.ones(3, 2))
