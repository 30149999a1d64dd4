from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.compiler.deterministic_kernels import ATOMIC_ON_CUDA, check_kernels, unknown_kernels
from tests.capturing import capture
from tests.drifting import Drifting, drifting_rule  # noqa: F401


class Pooled(nn.Module):
    """A pool whose backward adds up atomically on CUDA, and a running sum of numbers that are exact."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.ones(x.shape[-1], dtype=torch.long).cumsum(0)
        return nn.functional.adaptive_avg_pool2d(x * places, 3).square().mean()


def test_kernels_that_add_up_in_no_fixed_order_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Pooled(), (torch.randn(4, 2, 6, 6, requires_grad=True),), {}).gm.graph
    check_kernels(graph, "cpu", 2)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)
    with pytest.raises(fxdp.InputError, match=r"expected torch.use_deterministic_algorithms\(True\)"):
        check_kernels(graph, "cuda", 2)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(fxdp.StageError) as caught:
        check_kernels(graph, "cuda", 2)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert "test_deterministic_kernels.py" in line
    assert line.endswith("aten._adaptive_avg_pool2d_backward")


def test_the_names_are_those_of_ops() -> None:
    assert [name for name in ATOMIC_ON_CUDA if not hasattr(torch.ops.aten, name)] == []


@pytest.mark.usefixtures("drifting_rule")
def test_of_the_kernels_of_users_nothing_is_known() -> None:
    (line,) = unknown_kernels(capture(Drifting(), (torch.randn(4, 3),), {}).gm.graph)
    assert line.endswith(": fxdp_tests.drifting")
    assert unknown_kernels(capture(Pooled(), (torch.randn(4, 2, 6, 6),), {}).gm.graph) == ()
