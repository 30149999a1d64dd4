"""Where views of a stage's values are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxdp.annotations import note
from fxdp.staging.kinds import VIEWS
from tests.staging.cuts import program, staged


class Early(nn.Module):
    """Returns a view of an early value, beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x).tanh()
        return self.b(hidden).square().mean(), hidden.detach().unsqueeze(1)


def test_a_view_that_is_only_returned_is_made_where_its_base_is() -> None:
    gm = staged(Early(), torch.randn(4, 4), stages=("b",))
    output = gm.graph.output_node()
    (view,) = [n for n in output.all_input_nodes if n.target in VIEWS and not note(n).backward]
    assert note(view).stage == 0


class Wide(nn.Module):
    """A small value that a later stage reads repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        small = self.a(x.mean(1)).tanh().unsqueeze(1)
        return (self.b(x) * small.expand(-1, 64, -1)).square().mean()


def test_the_base_of_a_larger_view_is_sent() -> None:
    cut = program(Wide(), torch.randn(4, 64, 4), stages=("b",), ranks=2)
    sent = [e for e in cut.partition.edges if not e.backward]
    assert {e.type.shape[1:] for e in sent} == {(4,)}
