from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import fx

from fxdp.compiler.pass_manager import PassManager
from fxdp.errors import VerifierError
from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import S
from tests.graphs import Sketch, mesh

aten = torch.ops.aten


@dataclass(frozen=True)
class Step:
    """A pass that does nothing, or forgets the type of a node."""

    name: str = "step"
    requires: Level = Level.CAPTURED
    ensures: Level = Level.CAPTURED
    breaks: bool = False

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        if self.breaks:
            meta(next(iter(gm.graph.nodes))).type = None
        return gm


def _graph() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    return g.returns(
        {Output(0): g.call(aten.relu.default, x, type="f32[B]", at=S(0), reads=(S(0),))}, (S(0),)
    )


def test_the_code_of_a_graph_is_that_of_the_last_pass() -> None:
    """It is written when somebody reads it, not before the passes."""
    gm = copy_graph(_graph())
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    node.target = aten.tanh.default
    assert "torch.ops.aten.tanh.default" in gm.code


def test_a_pass_that_comes_too_early_is_refused() -> None:
    manager = PassManager(mesh())
    message = "pass late requires EXPLICIT, the graph is PLACED"
    with pytest.raises(VerifierError, match=message):
        manager.run(_graph(), [Step(ensures=Level.PLACED), Step("late", Level.EXPLICIT, Level.LOCAL)])


def test_a_level_is_never_lost() -> None:
    manager = PassManager(mesh(), level=Level.EXPLICIT)
    manager.run(_graph(), [Step(ensures=Level.CAPTURED)])
    assert manager.level is Level.EXPLICIT


def test_the_pass_to_blame_is_named() -> None:
    with pytest.raises(VerifierError, match="after breaker, the graph breaks level CAPTURED in 1 place:"):
        PassManager(mesh()).run(_graph(), [Step(), Step("breaker", breaks=True)])


def test_without_verification_anything_goes() -> None:
    PassManager(mesh(), verify=False).run(_graph(), [Step(breaks=True)])


def test_dumps_are_numbered_across_calls(tmp_path: Path) -> None:
    manager = PassManager(mesh(), dump_dir=tmp_path / "dumps")
    gm = manager.run(_graph(), [Step("first"), Step("second")])
    manager.run(gm, [Step("third")])
    names = sorted(file.name for file in (tmp_path / "dumps").iterdir())
    assert names == ["00-captured.txt", "01-first.txt", "02-second.txt", "03-third.txt"]
    assert (tmp_path / "dumps" / "03-third.txt").read_text().startswith("mesh(dp=2)\n  %x: f32[B] {dp=S(0)}")


def test_seconds_of_a_pass_that_runs_twice_are_added() -> None:
    manager = PassManager(mesh())
    manager.run(_graph(), [Step("a"), Step("b")])
    once = manager.seconds["a"]
    manager.run(_graph(), [Step("a")])
    assert list(manager.seconds) == ["a", "b"]
    assert manager.seconds["a"] > once > 0


def test_levels_are_in_the_order_of_compilation() -> None:
    assert [level.name for level in sorted(Level)] == [
        "CAPTURED", "PLACED", "EXPLICIT", "LOCAL", "STAGED", "EMITTED",
    ]  # fmt: skip


def test_no_garbage_is_collected_while_a_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Step, "run", lambda self, gm, mesh: seen.append(gc.isenabled()) or gm)
    PassManager(mesh()).run(_graph(), [Step()])
    assert (seen, gc.isenabled()) == ([False], True)


def test_garbage_is_collected_again_after_a_fault() -> None:
    with pytest.raises(VerifierError):
        PassManager(mesh()).run(_graph(), [Step(breaks=True)])
    assert gc.isenabled()
