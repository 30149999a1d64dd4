"""What a pass is, and the runner that lints, verifies, times and dumps after each.

Valid graph in, valid graph out: a pass declares the level it requires and the level it ensures, and the
runner checks both with `verifier.verify`. Passes know nothing of one another; their order is data in
`compiler/order.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import fx

from fxdp.errors import InputError, VerifierError
from fxdp.ir.graph_text import graph_text
from fxdp.ir.graphs import no_collection
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.torch_compat import without_autocast


class Pass(Protocol):
    """A frozen dataclass with a name and two levels; options are its fields."""

    @property
    def name(self) -> str:
        """A verb phrase in lower case with hyphens, as its file's name."""

    @property
    def requires(self) -> Level:
        """What must hold of the graph before."""

    @property
    def ensures(self) -> Level:
        """What holds of it afterwards."""

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """The graph after the pass, which may be the same object, changed."""


@dataclass
class PassManager:
    """Runs passes in order.

    Parameters
    ----------
    mesh : what the passes compile for.
    verify : check the invariants of the level after each pass (on by default).
    dump_dir : write `00-captured.txt`, `01-<pass>.txt`, ... there; None: no files.
    """

    mesh: Mesh
    verify: bool = True
    dump_dir: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each pass, its verification included."""

    level: Level = Level.CAPTURED
    """What holds of the graph that the next pass gets."""

    def run(self, gm: fx.GraphModule, passes: Sequence[Pass]) -> fx.GraphModule:
        """The graph after these passes, which go on from where the last call stopped.

        Raises
        ------
        VerifierError : a pass was asked for out of order, or left a graph that breaks its level.
        """
        if not self.seconds:
            self._dump(gm, "captured")
        for step in passes:
            if step.requires > self.level:
                raise VerifierError(
                    f"pass {step.name} requires {step.requires.name}, the graph is {self.level.name}"
                )
            self.level = max(step.ensures, self.level)
            with no_collection(), without_autocast():
                gm = self._run_one(gm, step)
            self._dump(gm, step.name)
        return gm

    def _run_one(self, gm: fx.GraphModule, step: Pass) -> fx.GraphModule:
        from fxdp.compiler.verifier import verify

        start = time.perf_counter()
        gm = step.run(gm, self.mesh)
        if self.verify:
            verify(gm, self.level, step.name)
        self.seconds[step.name] = self.seconds.get(step.name, 0.0) + time.perf_counter() - start
        return gm

    def _dump(self, gm: fx.GraphModule, name: str) -> None:
        if self.dump_dir is None:
            return
        try:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"dump_dir is {str(self.dump_dir)!r}, which cannot be made: {error}") from error
        text = graph_text(gm, self.mesh.shape)
        (self.dump_dir / f"{self._dumps:02d}-{name}.txt").write_text(text + "\n")
        self._dumps += 1

    _dumps: int = 0
