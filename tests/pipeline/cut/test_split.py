"""The union of the parts is the program: nothing is dropped, and nothing runs twice but what is meant to."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxdp.compiler.program import Program
from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import is_view
from fxdp.pipeline.cut.phases import recall_phases
from fxdp.pipeline.cut.stage_checks import STAGE_CHECKS
from tests.pipeline import models
from tests.pipeline.cut.cuts import program
from tests.pipeline.own_statistics import Net
from tests.pipeline.own_statistics import inputs as net_inputs


class Tied(nn.Module):
    """The first weight is the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden).tanh() + x
        return nn.functional.linear(hidden, self.layers[0].weight).square().mean()


CASES: dict[str, dict[str, Any]] = {
    "skips": {"pipeline": {"stages": 4, "microbatches": 2}},
    "unet": {"pipeline": {"stages": 3, "microbatches": 3}, "dp": 2},
    "tied": {"pipeline": {"stages": 3, "microbatches": 2}},
    "batch norm": {"pipeline": {"stages": 2, "microbatches": 2, "batch_stats": "microbatch"}, "dp": 2},
    "one stage": {"pipeline": {"stages": 1, "microbatches": 2}},
}


@cache
def _cut(name: str) -> Program:
    options = CASES[name]
    if name in ("skips", "unet"):
        return program(models.build(name), *models.inputs(name, 6).values(), **options)
    if name == "batch norm":
        return program(Net().double(), *net_inputs(6).values(), **options)
    return program(Tied(), torch.randn(6, 4), **options)


def _ops(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("name", CASES)
def test_each_op_is_in_the_parts_that_it_belongs_to(name: str) -> None:
    cut = _cut(name)
    partition, graph = cut.partition, cut.gm.graph
    phases = recall_phases(graph, several=cut.options.pipeline.microbatches > 1)
    stages = [Counter(_ops(part.gm)) for part in partition.parts]
    for node in graph.nodes:
        if not phases.is_own(node):
            continue
        where = [s for s, found in enumerate(stages) if found[node.name]]
        if is_view(node.target) and node not in phases.backward:
            assert meta(node).stage in where, f"%{node.name} is not at home"
        else:
            assert where == [meta(node).stage], f"%{node.name} is in {where}"
        assert max(found[node.name] for found in stages) == 1
    # the collectives among them are grouped anew, under names of their own
    late = {
        n.name
        for n in phases.epilogue
        if n.target not in redistributions.COLLECTIVES and n.target is not redistributions.wait
    }
    ends = [set(_ops(part.gm)) for part in partition.epilogues if part is not None]
    early = {n.name for n in phases.prologue}
    assert not any(late & set(found) for found in stages), "an op of the epilogue runs per micro-batch"
    assert not any(early & set(found) for found in stages), "an op of the prologue runs per micro-batch"
    for op in late:
        assert sum(op in found for found in ends) == 1, f"%{op} of the epilogue is not run once"


@pytest.mark.parametrize("name", CASES)
def test_every_result_has_one_home(name: str) -> None:
    cut = _cut(name)
    partition = cut.partition
    assert [spec for spec, _, _ in partition.results] == list(meta(cut.gm.graph.output_node()).results)
    given = [set(part.gives) for part in (*partition.parts, partition.prologue, *partition.epilogues) if part]
    for _, value, _ in partition.results:
        assert any(value in names for names in given), value


@pytest.mark.parametrize("name", CASES)
def test_what_a_part_reads_another_gives(name: str) -> None:
    partition = _cut(name).partition
    edges = {(e.name, e.target): e for e in partition.edges}
    early = set(partition.prologue.gives) if partition.prologue else set()
    for stage, part in enumerate(partition.parts):
        for spec in part.reads:
            if spec.name in early:
                continue
            edge = edges.pop((spec.name, stage))
            assert edge.name in partition.parts[edge.source].gives
            assert edge.backward == spec.backward
            assert (edge.source > stage) == edge.backward, "a value goes the wrong way"
    assert not edges, "an edge that nobody reads"


@pytest.mark.parametrize("name", CASES)
def test_the_cut_obeys_the_verifier(name: str) -> None:
    graph = _cut(name).gm.graph
    assert [fault for check in STAGE_CHECKS for fault in check(graph)] == []
    stages = {meta(n).stage for n in graph.nodes} - {None}
    assert stages == set(range(CASES[name]["pipeline"]["stages"]))


def test_a_skip_goes_straight_to_its_stage() -> None:
    x, y = models.inputs("skips", 6).values()
    edges = program(
        models.build("skips"), x, y, pipeline={"stages": ("b", "c", "d")}, ranks=4
    ).partition.edges
    forward = {(e.source, e.target) for e in edges if not e.backward}
    assert {(0, 3), (1, 3)} <= forward
    assert not [e for e in edges if e.source == e.target]


class Shares(nn.Module):
    """Stage 1 uses values of stage 0: of parameters alone, of the number of samples, of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = self.table.softmax(0)
        rows = self.table.repeat(x.shape[0], 1).exp()
        first = self.a(x) * same + rows
        return (self.b(first) * same + rows).sum()


def test_only_what_depends_on_parameters_alone_is_sent_once() -> None:
    """Gradients are of each micro-batch."""
    found = program(Shares(), torch.randn(8, 4), pipeline={"stages": ["b"], "microbatches": 2}, ranks=2)
    ops = {node.name: str(node.target) for node in found.gm.graph.nodes}
    edges = {ops[e.name]: e.once for e in found.partition.edges if not e.backward}
    assert edges["aten._softmax.default"]
    assert len(edges) == 3
    assert sum(edges.values()) == 1
    assert not any(e.once for e in found.partition.edges if e.backward)
