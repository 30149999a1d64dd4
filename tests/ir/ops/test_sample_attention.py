"""Attention within packed samples, beside attention with a mask, also of operands in another order."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten
from fxdp.ir.ops.sample_attention import ATTENTION, ATTENTION_BACKWARD

_KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_samples_attend_to_themselves(causal: bool, turned: bool) -> None:
    torch.manual_seed(0)
    numbers = torch.tensor([4, 4, 7, 7, 7, 2, 2, 2, 0])
    given = [torch.randn(1, 2, 9, 4).double().requires_grad_() for _ in range(3)]
    shown = numbers[:, None] == numbers
    mask = torch.where(shown.tril() if causal else shown, 0.0, -torch.inf).double()
    expected = F.scaled_dot_product_attention(*given, mask, scale=0.3)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given, grad)

    def laid(x: torch.Tensor) -> torch.Tensor:
        return x.detach().mT.contiguous().mT if turned else x.detach()

    operands = [laid(x) for x in given]
    out, sums = ATTENTION(*operands, numbers, causal, 0.3)
    found = ATTENTION_BACKWARD(laid(grad), *operands, laid(out), sums, numbers, causal, 0.3)
    for own, other in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(own, other.detach(), rtol=0, atol=1e-12)
    with_mask = local_op(_KERNEL)(*operands, 0.0, False, mask, 0.3)
    torch.testing.assert_close(with_mask[0], expected.detach(), rtol=0, atol=1e-12)


def test_no_rows_attend_to_nothing() -> None:
    none, numbers = torch.ones(1, 2, 0, 4), torch.ones(0, dtype=torch.int64)
    out, sums = ATTENTION(none, none, none, numbers, True, None)
    again = local_op(_KERNEL)(none, none, none, 0.0, False, torch.ones(0, 0), None)
    assert out.shape == again[0].shape == none.shape
    assert sums.shape == again[1].shape == (1, 2, 0)
    grads = ATTENTION_BACKWARD(none, none, none, none, out, sums, numbers, True, None)
    assert [grad.shape for grad in grads] == [none.shape] * 3
