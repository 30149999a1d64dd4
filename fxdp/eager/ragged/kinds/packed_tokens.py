"""Packed documents of transformers' `DataCollatorWithFlattening`: one row of all tokens.

{"input_ids": [1, T], "position_ids": [1, T], "cu_seq_lens_q": [D + 1], "max_length_q": int}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds.object_fields import Largest


def rows(mapping: Mapping[Any, Any]) -> dict[str, Rows | Largest]:
    """Return what the values of packed documents hold; empty for all else."""
    ids, positions = mapping.get("input_ids"), mapping.get("position_ids")
    is_packed = _is_row(ids) and _is_row(positions) and mapping.get("attention_mask") is None
    if not is_packed or ids.shape != positions.shape:  # type: ignore[union-attr]
        return {}
    found: dict[str, Rows | Largest] = {
        key: Rows("tokens", dim=1)
        for key, value in mapping.items()
        if _is_row(value) and value.shape == ids.shape  # type: ignore[union-attr]
    }
    for key in mapping:
        if key in ("cu_seq_lens_q", "cu_seq_lens_k"):
            found[key] = Rows("documents", bounds="tokens")
        elif key in ("max_length_q", "max_length_k"):
            found[key] = Largest()
    if "seq_idx" in found:
        found["seq_idx"] = Rows("tokens", dim=1, into="documents")
    return found


def _is_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == 1
