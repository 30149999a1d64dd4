"""Packed documents on virtual ranks: attention within each, without gathers, if possible without a mask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp import Rows
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.ops.sample_attention import ATTENTION, ATTENTION_BACKWARD
from fxdp.ir.types.sizes import axis
from fxdp.ir.types.value_types import TensorType
from tests.oracle.test_ragged_axes import gathered, run_ragged

_LENGTHS = [[3, 4], [], [1], [5, 2, 1, 1]]


def _packed(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return tokens, positions and numbers of documents of these lengths, and the lengths."""
    positions = [torch.arange(0), *map(torch.arange, lengths)]
    counts = torch.tensor(lengths, dtype=torch.int64)
    numbers = torch.arange(len(lengths)).repeat_interleave(counts)
    return torch.randn(1, sum(lengths), 8).double(), torch.cat(positions)[None], numbers[None], counts


_ROWS = (
    Rows("tokens", dim=1), Rows("tokens", dim=1, within="documents"),
    Rows("tokens", dim=1, into="documents"), Rows("documents", lengths="tokens"),
)  # fmt: skip


class _Documents(nn.Module):
    """Attention within documents; `told` is how a token's document is found, and to which it attends."""

    def __init__(self, told: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.told = nn.Linear(8, 24).double(), told

    def _numbers(self, positions: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
        if self.told == "pointers":
            return numbers
        if self.told == "lengths":
            return torch.repeat_interleave(lengths, output_size=positions.shape[1])[None]
        if self.told == "steps":
            return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        return (positions == 0).cumsum(-1) - 1

    def _mask(self, positions: Tensor, numbers: Tensor) -> Tensor:
        mask = numbers[:, None, :, None] == numbers[:, None, None, :]
        rows, columns = positions[:, None, :, None], positions[:, None, None, :]
        if self.told == "window":
            return mask & (rows - columns < 3)
        if self.told == "later":
            return mask & (rows <= columns)
        if self.told == "lengths":
            places = torch.arange(positions.shape[1])
            return mask & (places <= places[:, None])
        return mask if self.told == "zeros" else mask & (columns <= rows)

    def forward(
        self, x: Tensor, positions: Tensor, numbers: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key, value = self.project(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self._mask(positions, self._numbers(positions, numbers, lengths)).expand(1, 2, -1, -1)
        h = F.scaled_dot_product_attention(query, key, value, mask)
        return h, h.pow(2).mean()


@pytest.mark.parametrize("told", ["steps", "zeros", "lengths", "pointers", "window", "later"])
def test_packed_documents_attend_without_gathers(told: str) -> None:
    torch.manual_seed(1)
    graph = run_ragged(_Documents(told), [_packed(lengths) for lengths in _LENGTHS], _ROWS)
    assert not any(type_.dtype.is_floating_point for type_ in gathered(graph))
    tensors = [node for node in graph.nodes if isinstance(meta(node).type, TensorType)]
    tokens = axis("tokens").total
    masked = [node for node in tensors if tokens in tensor_type(node).shape[-2:-1]]
    by_samples = [node.args[-2] for node in graph.nodes if node.target in (ATTENTION, ATTENTION_BACKWARD)]
    if told in ("steps", "zeros", "lengths"):
        assert by_samples == [told != "zeros"] * 2
        assert not any(tensor_type(n).dtype == torch.bool for n in masked)
    else:
        # a mask that says more stays, of the rank's own rows and columns: none is cut from that of all tokens
        assert not by_samples
        square = [node for node in masked if tensor_type(node).shape[-1] == tokens]
        assert square
        assert not any(node.target is torch.ops.aten.slice.Tensor for node in square)
