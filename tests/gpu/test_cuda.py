"""The same program on a GPU; these run only where there is one (`pytest -m gpu`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxdp
from fxdp.cli.demo.model import GPT, GPTConfig
from fxdp.ir.tensor_difference import difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 16, layers=2, width=32, heads=2)).double().cuda()
    tokens = torch.randint(64, (4, 17), device="cuda")
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_gpu_is_exact(backend: str) -> None:
    """Loss and every gradient, three steps, at world size 1; no collective."""
    model, x, y = _gpt()
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(model, backend=backend)
    for _ in range(3):
        loss, expected = compiled(x, y), twin(x, y)
        loss.backward()
        expected.backward()
        assert difference(loss.detach(), expected.detach()) <= 1e-9
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert difference(ours.grad, theirs.grad, 1e-6) <= 1e-9
            ours.grad = theirs.grad = None
    assert compiled.plan.communication == ()


def test_another_batch_size_on_the_gpu() -> None:
    model, x, y = _gpt()
    compiled = fxdp.compile(model)
    for size in (4, 3, 2):
        assert difference(compiled(x[:size], y[:size]).detach(), model(x[:size], y[:size]).detach()) <= 1e-9
