"""Of Inductor's rules for the dtypes of results: its table of them is made once, not for each op of a kernel.

Torch means the table to be the only one of its class, but Python fills it anew each time that it is asked
for: a twentieth of the time that Inductor takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut

__all__ = ["memoized_dtypes"]


@shortcut("memoized_dtypes")
def memoized_dtypes() -> Iterator[None]:
    """Inside, the table is filled at first, and again where there are more rules."""
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
