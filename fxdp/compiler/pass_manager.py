"""The interface of a pass, and the runner that lints, verifies, times and dumps after each pass.

Valid graph in, valid graph out: a pass declares the required and the ensured level, and the runner checks
both with `verifier.verify`. Passes do not depend on one another; their order is data in
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
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.graphs import no_collection
from fxdp.ir.graph.level import Level
from fxdp.ir.types.mesh import Mesh
from fxdp.torch_compat import without_autocast


class Pass(Protocol):
    """A frozen dataclass with a name and two levels; further fields are the pass's options."""

    @property
    def name(self) -> str:
        """A verb phrase in lower case with hyphens, as its file's name."""

    @property
    def requires(self) -> Level:
        """The level that the graph must have before the pass."""

    @property
    def ensures(self) -> Level:
        """The level that the graph has after the pass."""

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Return the graph after the pass, which may be the same object, modified."""


@dataclass
class PassManager:
    """Runner of passes, in order.

    Parameters
    ----------
    mesh : the mesh for which the passes compile.
    verify : check the invariants of the level after each pass (on by default).
    dump_dir : folder for `00-captured.txt`, `01-<pass>.txt`, ...; None: no files.
    """

    mesh: Mesh
    verify: bool = True
    dump_dir: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each pass, including verification."""

    level: Level = Level.CAPTURED
    """The level of the graph before the next pass."""

    def run(self, gm: fx.GraphModule, passes: Sequence[Pass]) -> fx.GraphModule:
        """Run these passes and return the graph; a second call continues from the level reached by the first.

        Raises
        ------
        VerifierError : a pass requires a higher level, or produced a graph that breaks the ensured level.
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
