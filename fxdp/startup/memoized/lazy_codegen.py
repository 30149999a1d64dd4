"""Generate the Python code of a graph module at the first call, not at each change of the graph.

Export, tracing and the partitioner change a graph in a dozen passes, and torch prints and compiles the code
after each pass. Nothing calls this code: the next trace runs the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut

__all__ = ["lazy_codegen"]

_WRITE_CODE = GraphModule.recompile


@shortcut("lazy_codegen")
def lazy_codegen() -> Iterator[None]:
    """Generate no code for a graph module before the first call; torch's own lazy modules are unchanged."""

    from torch.fx.graph import _PyTreeCodeGen

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        _WRITE_CODE(self)  # replaces this function by the generated one
        return self.forward(*args, **kwargs)

    def recompile(self: GraphModule) -> None:
        codegen = self._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):  # the structure of arguments, which is read without a call
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward  # the class is one that torch made for this module alone

    with patched((Patch(GraphModule, "recompile", lambda _: recompile),)):
        yield
