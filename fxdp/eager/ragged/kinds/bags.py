"""Bags of `nn.EmbeddingBag`, in a mapping: `{"input": values of all bags, "offsets": where each begins}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds.object_fields import Largest

_VALUES = ("input", "indices", "values", "text", "tokens")
"""Keys of the values, of which a mapping with bags has one."""


def rows(mapping: Mapping[Any, Any]) -> dict[str, Rows | Largest]:
    """Return what the values of a mapping with bags hold; empty for all else."""
    found = [key for key in _VALUES if _is_flat(mapping.get(key))]
    if len(found) != 1 or not _is_flat(mapping.get("offsets")):
        return {}
    made: dict[str, Rows | Largest] = {found[0]: Rows("values"), "offsets": Rows("samples", starts="values")}
    if _is_flat(mapping.get("per_sample_weights")):
        made["per_sample_weights"] = Rows("values")
    return made


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
