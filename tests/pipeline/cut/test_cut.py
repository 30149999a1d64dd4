"""Where views of a stage's values are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxdp.cli.demo.model import GPT, GPTConfig
from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import is_view
from fxdp.pipeline.cut.cost import node_cost
from fxdp.pipeline.cut.cut import _costs
from fxdp.pipeline.cut.phases import recall_phases
from tests.pipeline.cut.cuts import program, staged


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
    gm = staged(Early(), torch.randn(4, 4), pipeline={"stages": ("b",)})
    output = gm.graph.output_node()
    (view,) = [n for n in output.all_input_nodes if is_view(n.target) and not meta(n).backward]
    assert meta(view).stage == 0


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
    cut = program(Wide(), torch.randn(4, 64, 4), pipeline={"stages": ("b",)}, ranks=2)
    sent = [e for e in cut.partition.edges if not e.backward]
    assert {e.type.shape[1:] for e in sent} == {(4,)}


@pytest.mark.parametrize("stages", [2, 3])
def test_what_is_balanced_is_what_the_stages_do(stages: int) -> None:
    """The costs that the cut is chosen by are those of the nodes that end up on each stage."""
    model = GPT(GPTConfig(vocabulary=32, length=8, layers=3, width=16, heads=2))
    tokens = torch.zeros(4, 8, dtype=torch.long)
    graph = staged(model, tokens, tokens, ranks=stages, pipeline={"microbatches": 2}).graph
    phases = recall_phases(graph, several=True)
    own = [n for n in graph.nodes if phases.is_own(n)]
    forward = [n for n in own if n not in phases.backward]
    chosen = [0.0] * stages
    for node, cost in zip(forward, _costs(graph, forward, phases), strict=True):
        chosen[meta(node).stage or 0] += cost
    done = [0.0] * stages
    for node in own:
        done[meta(node).stage or 0] += node_cost(node)
    assert chosen == pytest.approx(done)
    assert max(done) <= 1.15 * sum(done) / stages
