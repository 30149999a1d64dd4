"""Correct the Python that Inductor writes for the offset of a row selected by a data-dependent index.

    %part = select(%x, 0, %u7)     %x has as many rows as the smaller of two sizes
    u9 = 0 + 8 * (.. + Min(6*s0, u0) if u7 < 0 else u7)              torch: `Min` is no name of Python's
    u9 = (0) + (8) * (.. + (min(6*s0, u0)) if (u7) < 0 else (u7))    here

Torch prints sizes in sympy's syntax, and prints a sum before a product without parentheses (2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fxdp.torch_compat.patch import Patch, around, patched

__all__ = ["selected_offsets"]

_NAME = "codegen_dynamic_select_index"
_SIZES = ("index", "size", "base_offset", "base_dim_stride")


@contextlib.contextmanager
def selected_offsets() -> Iterator[None]:
    """Write these sizes as Python expressions in parentheses inside the block."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    has_it = hasattr(PythonWrapperCodegen, _NAME)  # an unknown torch may lack this op
    with patched((Patch(PythonWrapperCodegen, _NAME, around(_written)),) if has_it else ()):
        yield


def _written(plain: Callable[..., None], self: Any, node: Any, *args: Any, **kwargs: Any) -> None:
    sizes = {name: f"({self.codegen_sizevar(getattr(node, name))})" for name in _SIZES}
    symbol = node.unbacked_offset_symbol
    plain(self, SimpleNamespace(unbacked_offset_symbol=symbol, **sizes), *args, **kwargs)
