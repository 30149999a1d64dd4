"""Choices of a library between two ways to the same numbers, by values of the batch: a trace takes one.

torch_geometric's `RGCNConv` reads how many edges the most frequent type has, to choose between one fused
product and a product for each type; of the two only the latter can be traced.
"""

from __future__ import annotations

import sys

from fxdp.torch_compat import Patch


def library_choices() -> tuple[Patch, ...]:
    """Return patches of the libraries that are imported."""
    backend = sys.modules.get("torch_geometric.backend")
    name = "use_segment_matmul"
    return (Patch(backend, name, lambda _: False),) if backend is not None and hasattr(backend, name) else ()
