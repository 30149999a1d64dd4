"""Unify the sizes of values selected by equal masks, after Inductor has merged the masks.

    %a = index(%x, [eq(%kind, 0)])     u0 rows      Inductor finds that      %a = index(%x, [%m])     u4 rows
    %b = index(%y, [eq(%kind, 0)])     u1 rows      both masks are one       %b = index(%y, [%m])     u4 rows

Torch retraces the merged graph, allocates one symbol per mask, and renames the symbol to the former one of
the node: `u4 -> u0`. For `u4 -> u1` torch raises, and Inductor compiles nothing (torch 2.13). The masks are
equal, so u0 and u1 are equal, too. Torch 2.14 and 2.15 unify some of these symbols, and Inductor then asks
for symbols that are gone, so these releases need the workaround as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from fxdp.torch_compat.patch import Patch, around, patched

__all__ = ["counted_masks"]


@contextlib.contextmanager
def counted_masks() -> Iterator[None]:
    """Replace symbols of one mask by a single symbol inside the block."""
    with patched((Patch(ShapeEnv, "_rename_unbacked_to", around(_rename)),)):
        yield


def _rename(plain: Callable[..., None], self: ShapeEnv, orig_s: Any, new_s: Any) -> None:
    known = self.replacements.get(orig_s)
    if known is None or not free_unbacked_symbols(known):
        plain(self, orig_s, new_s)
        return
    first, other = self.replace(orig_s), self.replace(new_s)
    if first != other:
        self._set_replacement(other, first, "counts of one mask")
