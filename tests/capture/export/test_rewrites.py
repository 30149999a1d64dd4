"""Lists over the batch that are joined again, and modules that convert themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lockstep import check

JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "cat of a list": lambda x: torch.cat(list(x), 0),
    "stack of a list": lambda x: torch.stack([*x], 0),
    "stack of unbind": lambda x: torch.stack(x.unbind(0)),
    "cat of split": lambda x: torch.cat(x.split(1)),
    "cat of split by sizes": lambda x: torch.cat(x.split([1] * len(x))),
}


class Joins(nn.Module):
    """Takes the hidden states apart and joins them."""

    def __init__(self, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        self.fc = self.fc.to(x.dtype)  # does nothing, in each step
        return self.join(self.fc(x)).square().sum(-1)


@pytest.mark.parametrize("name", JOINED)
def test_a_list_that_is_joined_again(name: str) -> None:
    local = check(Joins(JOINED[name]), (torch.randn(8, 2, 3),))
    assert local.captured.static
    ops = [str(node.target) for node in local.gm.graph.nodes]
    assert not any("unbind" in op or "split" in op for op in ops)
    assert not any("all_gather" in op for op in ops)


class Pictures(nn.Module):
    """Idefics 3: of each sample as many pictures as it says, which meet again as rows, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        parts = self.fc(x).split(counts.tolist())
        rows = torch.cat([part.reshape(-1, 5) for part in parts], 0)
        return rows.square().sum() / (counts.sum() + rows.numel())


def test_rows_of_parts_of_which_the_data_says_how_long_they_are() -> None:
    """Neither the parts nor the numbers that were read are needed: no graph differs by the batch size."""
    local = check(Pictures(), (torch.randn(8, 2, 3), torch.ones(8, dtype=torch.long)))
    assert local.captured.static
    ops = [str(node.target) for node in local.gm.graph.nodes]
    assert not any(word in op for op in ops for word in ("split", "item", "unbind", "all_gather"))


class OtherRows(nn.Module):
    """The parts' features lie otherwise in the rows: these are no rows of the full value."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part.reshape(-1, 2) for part in x.split(1, 1)], 0).square().cumsum(0).mean()


def test_parts_along_another_dim_stay_parts() -> None:
    x = torch.randn(8, 4, 2)
    local = check(OtherRows(), (x,))
    assert any("split" in str(node.target) or "slice" in str(node.target) for node in local.gm.graph.nodes)
