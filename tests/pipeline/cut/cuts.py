"""Cut a captured model into stages, for tests."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from fxdp.compiler.prepare import prepare
from fxdp.compiler.program import Program
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options
from tests.capturing import capture


def program(module: nn.Module, *args: Any, ranks: int = 1, dp: int = 1, **options: Any) -> Program:
    """The staged program of `module(*args)`."""
    chosen = Options(**options)
    parts = dp * chosen.pipeline.microbatches
    found = capture(module, args, {}, couple=parts > 1, own_statistics=chosen.own_statistics)
    return prepare(found, mesh_of({"pp": ranks, "dp": dp}, "cpu"), chosen, 64, cut=True)


def staged(module: nn.Module, *args: Any, **options: Any) -> fx.GraphModule:
    """The graph with a stage on every node that belongs to one."""
    return program(module, *args, **options).gm
