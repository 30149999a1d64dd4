"""What a user can look at of a compiled module: its mesh, and plan, graph and program of the last call."""

from __future__ import annotations

from torch import fx

from fxdp.compiler.planning import Planning
from fxdp.errors import StateError
from fxdp.ir.mesh import Mesh
from fxdp.module.served import Served
from fxdp.module.wrappers import Bare
from fxdp.ranks.joined import Joined
from fxdp.reports.graph_display import displayed
from fxdp.reports.plan import Plan


class Inspected(Bare):
    """A stand-in that shows what runs in the model's place. Who derives from it declares these, too."""

    _joined: Joined
    _mesh: Mesh
    _served: Served | None

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last.

        Raises
        ------
        StateError : nothing was compiled yet.
        """
        served = self._last()
        return Planning(served.program, served.sizes).plan(self._joined.device_mesh)

    @property
    def graph(self) -> fx.GraphModule:
        """The annotated graph of the program that ran last: see `Plan.graph`."""
        served = self._last()
        graph = served.program.graph(served.sizes, self._joined.device_mesh)
        return displayed(graph, "the annotated graph of the whole batch")

    @property
    def program(self) -> fx.GraphModule:
        """This rank's emitted program that ran last."""
        return displayed(self._last().graph, "this rank's program")

    def _last(self) -> Served:
        if self._served is None:
            raise StateError("nothing is compiled yet: call the module once, or use fxdp.plan")
        return self._served

    @property
    def mesh(self) -> Mesh:
        """The mesh this module runs on, seen from this rank."""
        return self._mesh

    def __repr__(self) -> str:
        return f"fxdp.compile({self._mesh},\n{self._model!r})"
