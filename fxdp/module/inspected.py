"""The inspectable properties of a compiled module: mesh, and plan, graph and program of the last call."""

from __future__ import annotations

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.compiler.partial_plan import partial_plan
from fxdp.compiler.planning import Planning
from fxdp.errors import CaptureError, StateError
from fxdp.ir.types.mesh import Mesh
from fxdp.module.cache_entry import CacheEntry, LastCall
from fxdp.module.wrappers import Bare
from fxdp.options import Options
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.reports.graph_display import displayed
from fxdp.reports.plan import Plan


class Inspected(Bare):
    """Base class with the inspectable properties; a subclass must provide the attributes declared here."""

    _process_mesh: ProcessMesh
    _mesh: Mesh
    _options: Options
    _last_call: LastCall

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last; with `fallback="eager"`, why a call ran op by op.

        Raises
        ------
        StateError : no program was compiled so far.
        """
        last = self._last_call
        if last.cache_entry is None and last.refused:
            told = f"the call runs on global tensors, op by op, as capture refuses it: {last.refused}"
            error, origin = CaptureError(told), Origin.here(self._options.loss_fn)
            return partial_plan(self._model, self._mesh, self._options, last.batch, error, origin)
        cache_entry = self._last()
        planning = Planning(cache_entry.program, cache_entry.sizes, last.split)
        return planning.plan(self._process_mesh.device_mesh)

    @property
    def graph(self) -> fx.GraphModule:
        """The annotated graph of the program that ran last: see `Plan.graph`."""
        cache_entry = self._last()
        graph = cache_entry.program.graph(cache_entry.sizes, self._process_mesh.device_mesh)
        return displayed(graph, "the annotated graph of the global batch")

    @property
    def program(self) -> fx.GraphModule:
        """The emitted program of this rank that ran last."""
        return displayed(self._last().graph, "this rank's program")

    def _last(self) -> CacheEntry:
        if self._last_call.cache_entry is None:
            raise StateError("nothing is compiled yet: call the module once, or use fxdp.plan")
        return self._last_call.cache_entry

    @property
    def mesh(self) -> Mesh:
        """The mesh of this module, as seen from this rank."""
        return self._mesh

    def __repr__(self) -> str:
        return f"fxdp.compile({self._mesh},\n{self._model!r})"
