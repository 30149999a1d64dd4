from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.rules.registry import registry
from tests.drifting import Drifting, drifting_rule  # noqa: F401


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
