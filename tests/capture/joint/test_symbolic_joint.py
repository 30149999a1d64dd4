"""Graphs from elsewhere enter at the second half of capture."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_structure

from fxdp import torch_compat
from fxdp.capture.captured import Captured, OutputLeaf
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.raw_joint import BatchSpecializedError, JointOptions
from fxdp.capture.joint.symbolic_joint import symbolic_joint
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.ir.graph.graph_text import graph_text
from fxdp.reports.plan_data.collective_rows import communication
from tests.capturing import capture
from tests.lockstep import check


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.norm(self.fc(x)).relu()
        return nn.functional.cross_entropy(z, y), z


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])


def exported_by_hand(model: nn.Module) -> fx.GraphModule:
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, inputs(), dynamic_shapes=({0: dynamic}, {0: dynamic}))
    return torch_compat.exported_module(program)


def attributed(gm: fx.GraphModule, model: nn.Module) -> fx.GraphModule:
    """A graph of Dynamo, which has parameters as inputs, with these as attributes by the names they have."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.find_nodes(op="placeholder"):
        source = node.meta["grapharg"].source.name  # L['self']._modules['fc']._parameters['weight']
        if source.startswith("L['self']"):
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(".".join(re.findall(r"_\w+\['(\w+)'\]", source))))
        if not node.users:
            graph.erase_node(node)
        node.meta["val"] = node.meta["example_value"]
    return fx.GraphModule(model, graph)


def entered(gm: fx.GraphModule, model: nn.Module, how: JointOptions | None = None) -> Captured:
    """The joint graph of a forward graph that returns a tuple of tensors."""
    (results,) = gm.graph.output_node().args
    leaves = tuple(OutputLeaf(i) for i in range(len(results)))
    exported = Exported(gm, model, ("x", "y"), (0, 0), True, leaves, tree_structure(leaves))
    with capture_patches(gm, None):
        return symbolic_joint(exported, how or JointOptions())


def test_a_graph_from_elsewhere_gives_the_graph_that_capture_gives() -> None:
    model = Model()
    own = capture(model, inputs(), {})
    found = entered(exported_by_hand(model), model)
    assert graph_text(found.gm) == graph_text(own.gm)
    assert found.batch == own.batch
    assert found.detached == own.detached


def test_options_of_the_second_half_count() -> None:
    model = Model()
    how = JointOptions(differentiable="all", couple=False)
    own = capture(model, inputs(), {}, differentiable="all", couple=False)
    assert graph_text(entered(exported_by_hand(model), model, how).gm) == graph_text(own.gm)


def test_a_graph_of_dynamo_enters_with_its_parameters_by_their_names() -> None:
    """Dynamo hands over parameters as inputs; they become attributes by the names of their sources."""
    model, graphs = Model(), []

    def backend(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        graphs.append(attributed(gm, model))
        return gm

    x, y = inputs()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    torch.compile(model, backend=backend, fullgraph=True)(x, y)
    assert len(graphs) == 1
    assert graph_text(entered(graphs[0], model).gm) == graph_text(capture(model, inputs(), {}).gm)


def test_a_graph_that_fixes_its_batch_is_refused() -> None:
    program = torch.export.export(Model(), inputs())
    with pytest.raises(BatchSpecializedError, match="the batch size became the constant 6"):
        entered(program.module(), Model())  # type: ignore[arg-type]


class Chosen(nn.Module):
    """Values of each sample that a mask chooses, beside all of them: as many if it chooses all."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.fc(x)
        return (y.flatten(0, 1) + y[mask]).square().mean()


def test_a_selection_as_long_as_the_whole_is_traced_with_an_open_batch() -> None:
    """Torch fails to put `5*B` for the selection's size: its bound, a float, is above all integers."""
    inputs = torch.randn(6, 5, 4), torch.ones(6, 5, dtype=torch.bool)
    assert not capture(Chosen(), inputs, {}).static
    local = check(Chosen().double(), (inputs[0].double(), inputs[1]), splits=((4, 2), (5, 0, 1)))
    assert all(row.bytes >= 0 for row in communication(local.causes, {"B": 6}))
