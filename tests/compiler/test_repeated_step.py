from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.rules.registry import registry
from tests.drifting import Drifting, drifting_rule  # noqa: F401
from tests.rank_pool import RankPool


@pytest.mark.usefixtures("drifting_rule")
def test_an_op_with_other_bits_each_time_is_refused_before_the_first_step() -> None:
    torch.manual_seed(0)
    model, batch = Drifting(), torch.randn(4, 3)
    compiled = fxdp.compile(model, numerics=fxdp.Bitwise(block=2), backend="eager")
    words = r"run twice, has other bits in .*gradient of layer.weight.*\n  at .*: fxdp_tests.drifting"
    with pytest.raises(fxdp.StageError, match=words):
        compiled(batch)
    assert model.layer.weight.grad is None
    fxdp.compile(model, backend="eager")(batch).backward()  # without a promise any op will do


_CALLS: list[int] = []


@torch.library.custom_op("fxdp_tests::steady", mutates_args=())
def steady(x: Tensor) -> Tensor:
    """Return x and a nan, whose bits are the same each time."""
    _CALLS.append(len(x))
    return torch.where(x > 0, x, float("nan"))


steady.register_fake(torch.empty_like)
steady.register_autograd(lambda ctx, grad: grad)


class Steady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return steady(self.layer(x)).square().mean()


@pytest.fixture
def steady_rule() -> Iterator[None]:
    fxdp.register_rule(steady, pointwise=True)
    yield
    registry.remove(torch.ops.fxdp_tests.steady)


@pytest.mark.usefixtures("steady_rule")
def test_an_op_with_the_same_bits_each_time_runs_twice_in_the_first_call_alone() -> None:
    compiled = fxdp.compile(Steady(), numerics=fxdp.Bitwise(block=2), backend="eager")
    counts = []
    for _ in range(2):
        _CALLS.clear()
        compiled(torch.randn(4, 3)).backward()
        counts.append(len(_CALLS))
    assert counts == [4, 2]


@torch.library.custom_op("fxdp_tests::of_rank_1", mutates_args=())
def of_rank_1(x: Tensor) -> Tensor:
    """Return x, a little larger with each call on rank 1."""
    _CALLS.append(dist.get_rank())
    return x + sum(_CALLS)


of_rank_1.register_fake(torch.empty_like)


class Parted(nn.Module):
    """An output of which each rank has its part, beside a loss with equal bits everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean(), "own": of_rank_1(x)}


def _refused_once() -> str:
    fxdp.register_rule(of_rank_1, pointwise=True)
    _CALLS.clear()
    compiled = fxdp.compile(Parted(), numerics=fxdp.Bitwise(block=2), backend="eager")
    with pytest.raises(fxdp.StageError) as caught:
        compiled(torch.ones(2, 3))
    registry.remove(torch.ops.fxdp_tests.of_rank_1)
    fxdp.compile(nn.Linear(3, 1), backend="eager")(torch.ones(2, 3)).sum().backward()  # ranks can go on
    return str(caught.value)


def test_all_ranks_refuse_an_op_that_has_other_bits_on_one(ranks: RankPool) -> None:
    first, second = ranks.run(2, _refused_once)
    assert first == second
    assert "run twice, has other bits in output 1." in first
