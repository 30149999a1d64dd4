"""Fill Inductor's table of dtype propagation rules once, not for each op of a kernel.

Torch declares the table's class as a singleton, but Python runs the constructor, which fills the table, at
each access: a twentieth of Inductor's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut

__all__ = ["memoized_dtypes"]


@shortcut("memoized_dtypes")
def memoized_dtypes() -> Iterator[None]:
    """Fill the table on first use inside the block, and again only after rules were added."""
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill = DtypePropagationOpsHandler.__init__
    filled: list[int] = []

    def fill_once(self: Any) -> None:
        rules = [len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)]
        if filled != rules:
            fill(self)
            filled[:] = rules

    with patched((Patch(DtypePropagationOpsHandler, "__init__", lambda _: fill_once),)):
        yield
