"""Of torch's graph modules: their Python code is written when one is called, not at each change of its graph.

Export, tracing and the partitioner change a graph in a dozen passes, and print and compile its code after
each. Nobody calls it: what is traced next runs the nodes.
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
    """Inside, no graph module gets code before its first call; torch's own lazy ones stay as they are."""

    from torch.fx.graph import _PyTreeCodeGen

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        _WRITE_CODE(self)  # puts the code in the place of this function
        return self.forward(*args, **kwargs)

    def recompile(self: GraphModule) -> None:
        codegen = self._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):  # how arguments lie, which is asked without a call
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward  # a class that torch made for this module alone

    with patched((Patch(GraphModule, "recompile", lambda _: recompile),)):
        yield
