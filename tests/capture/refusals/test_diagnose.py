"""What torch says is shown where it tells a user anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp import Rows
from fxdp.capture.refusals.diagnose import capture_error


@pytest.mark.parametrize(
    "said",
    [
        "4*u1 (<class 'torch.SymInt'>, 14)is not tracked with proxy for <x.PythonKeyTracer object at 0x7f>",
        "unhashable type: non-nested SymInt",
    ],
)
def test_names_of_torchs_own_parts_are_not_shown(said: str) -> None:
    message = str(capture_error(RuntimeError(said)))
    assert "data-dependent control flow" in message
    assert not any(word in message for word in ("SymInt", "Tracer", "torch:"))


def test_sizes_by_the_names_of_a_trace_are_not_shown() -> None:
    error = RuntimeError("Constraints violated (L['tensors'][0].size()[0])! Run with TORCH_LOGS")
    message = str(capture_error(error, "the number of results depends on the batch size"))
    assert "the number of results" in message
    assert "TORCH_LOGS" not in message


class _Spaced(nn.Module):
    """A weight of each edge by its number: torch takes only a plain number of steps."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return (x[edges[0]] * torch.linspace(0, 1, edges.shape[1])).sum()


def test_rows_that_code_makes_constant_are_named() -> None:
    dims = (Rows("nodes"), Rows("edges", dim=1, into="nodes")), {}
    inputs = torch.ones(4), torch.tensor([[0, 1, 3], [1, 2, 0]])
    with pytest.raises(fxdp.CaptureError, match=r"number of rows of 'edges' a constant.*torch\.linspace"):
        fxdp.plan(_Spaced(), inputs, mesh={"dp": 2}, batch_dims=dims)


class _Pooled(nn.Module):
    """A sum of each graph's nodes, without the number of graphs."""

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        graphs = int(of.max()) + 1
        return torch.zeros(graphs).index_add(0, of, x).square().sum()


def test_rows_that_are_counted_by_the_largest_index_are_to_be_passed() -> None:
    dims = (Rows("nodes"), Rows("nodes")), {}
    with pytest.raises(fxdp.CaptureError, match=r"of\.max.*Pass the number: len\(y\) of graphs"):
        fxdp.plan(_Pooled(), (torch.ones(4), torch.tensor([0, 0, 1, 1])), mesh={"dp": 2}, batch_dims=dims)


def test_an_expression_of_the_data_is_shown() -> None:
    error = RuntimeError("Could not guard on data-dependent expression u0 > 1 (unhinted: u0 > 1)")
    assert "\ntorch: Could not guard on data-dependent expression u0 > 1" in str(capture_error(error))


class _Router(nn.Module):
    """Switch Transformers' router: its own dtype, which the rest of the model need not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(torch.float32)
        return self.linear(x.float()).square().mean()


def test_a_module_that_its_forward_converts_is_named() -> None:
    """What is of that dtype already is left as it is."""
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(fxdp.CaptureError, match=r"linear.to.*converts the parameters .* \(Linear.weight\)"):
        fxdp.plan(_Router().double(), (x,), mesh={"dp": 2})
    assert "Linear" not in str(fxdp.plan(_Router().float(), (x,), mesh={"dp": 2}).graph)
