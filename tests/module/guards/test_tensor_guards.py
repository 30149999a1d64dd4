"""Parameters, buffers and modules that are replaced after a model was compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.ir.tensor_difference import difference
from tests.exactness.models import counterpart_of, gradient_errors
from tests.rank_pool import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x).tanh()) * self.scale).square().mean()


def _assign(net: Any) -> None:
    values = {name: value * 2 for name, value in net.state_dict().items()}
    net.load_state_dict(copy.deepcopy(values), assign=True)


def _parameter(net: Any) -> None:
    net.last.weight = nn.Parameter(net.last.weight.detach() * 2)


def _buffer(net: Any) -> None:
    net.scale = net.scale * 2


def _module(net: Any) -> None:
    net.last = nn.Sequential(nn.Identity(), net.last)
    net.last[1].bias = None


def _strides(net: Any) -> None:
    net.last.weight.data = net.last.weight.detach().t().contiguous().t()


def _worst(compiled: fxdp.CompiledModule, twin: nn.Module) -> float:
    x = torch.randn(5, 6)
    losses = compiled(x), twin(x)
    for net, loss in zip((compiled, twin), losses, strict=True):
        net.zero_grad()
        loss.backward()
    return max(difference(*(loss.detach() for loss in losses)), *gradient_errors(compiled._model, twin))


@pytest.mark.parametrize(
    "options", [{}, {"pipeline": {"stages": 2, "microbatches": 2}}], ids=["full", "staged"]
)
@pytest.mark.parametrize("replace", [_assign, _parameter, _buffer, _module, _strides])
def test_what_was_replaced_is_used(
    replace: Callable[[Any], None], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net().double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager", **options)
    x = torch.randn(5, 6, dtype=torch.float64)
    before = compiled(x).item()
    for net in (model, twin):
        with torch.no_grad():
            next(net.parameters()).mul_(0.5)  # in place: the same tensors
    assert compiled(x).item() != before
    assert "compiled anew" not in caplog.text
    for net in (model, twin):
        replace(net)
    torch.set_default_dtype(torch.float64)
    try:
        assert _worst(compiled, twin) <= 1e-12
    finally:
        torch.set_default_dtype(torch.float32)
    assert caplog.text.count("compiled anew") == 1


class Thirds(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.full((), 1 / 3, dtype=self.weight.dtype)


def test_a_model_that_is_converted_or_swapped_runs_as_it_is_then() -> None:
    """`model.double()` keeps the parameters, and gives them other memory, as `swap_tensors` does."""
    model = Thirds(9, 6)
    compiled = fxdp.compile(model, backend="eager")
    ids = torch.arange(5)
    assert compiled(ids).dtype == torch.float32
    model.double()
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-12, atol=0)
    torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach() * 2))
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-12, atol=0)


def _on_one_rank() -> str:
    model = Net()
    compiled = fxdp.compile(model, backend="eager")
    compiled(torch.randn(3, 6))
    if dist.get_rank() == 1:
        _buffer(model)
    try:
        compiled(torch.randn(3, 6))
    except fxdp.AgreementError as error:
        return str(error)
    return "no error"


def test_all_ranks_must_replace_the_same(ranks: RankPool) -> None:
    for text in ranks.run(2, _on_one_rank):
        assert "times that tensors were replaced=1" in text


def _other_sizes() -> str:
    model = Net()
    compiled = fxdp.compile(model, backend="eager")
    compiled(torch.randn(3, 6))
    model.last.weight = nn.Parameter(torch.randn(6 + 6 * dist.get_rank(), 6))
    try:
        compiled(torch.randn(3, 6))
    except fxdp.AgreementError as error:
        return str(error)
    return "no error"


def test_all_ranks_must_put_in_tensors_of_the_same_size(ranks: RankPool) -> None:
    for text in ranks.run(2, _other_sizes):
        assert "parameter last.weight float32[12, 6]" in text
