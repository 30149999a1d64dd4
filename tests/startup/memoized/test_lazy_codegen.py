"""Graph modules that are only traced get no code; those that are called get theirs."""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

import fxdp
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.startup.memoized.lazy_codegen import lazy_codegen
from tests.limits import HANG_S


def _twice(x: Tensor) -> Tensor:
    return x * 2


def test_code_is_written_at_the_first_call_and_after_a_change() -> None:
    with mock.patch.object(Graph, "python_code", autospec=True, side_effect=Graph.python_code) as written:
        with lazy_codegen():
            traced = symbolic_trace(_twice)
            traced.recompile()
            assert written.call_count == 0
            assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))
            (product,) = traced.graph.find_nodes(op="call_function", target=operator.mul)
            product.args = (product.args[0], 3)
            traced.recompile()
        assert torch.equal(traced(torch.ones(2)), torch.full((2,), 3.0))  # also when it is over
        assert written.call_count == 2
        traced.recompile()
        assert written.call_count == 3


def test_torch_is_put_back() -> None:
    before = GraphModule.recompile
    with lazy_codegen():
        assert GraphModule.recompile is not before
    assert GraphModule.recompile is before


def test_a_plan_writes_no_code() -> None:
    with mock.patch.object(Graph, "python_code", autospec=True, side_effect=Graph.python_code) as written:
        fxdp.plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),))
    assert written.call_count == 0


def test_another_thread_traces_meanwhile() -> None:
    """While one thread captures, modules of others have their code at once."""

    def traced() -> str:
        return symbolic_trace(nn.ReLU()).code

    wanted = traced()
    with capture_patches(nn.ReLU(), None), ThreadPoolExecutor(1) as other:
        assert other.submit(traced).result(HANG_S) == wanted
