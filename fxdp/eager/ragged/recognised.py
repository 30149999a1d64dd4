"""What the keys of plain inputs tell of a compiled call: `batch_dims` of packed documents, images and bags.

One size along dim 0 of all tensors means samples, as ever. Keys are read where that cannot be meant:

    {"input": [7], "offsets": [3]}               two sizes on a rank: bags
    {"input_ids": [1, 5], "position_ids": ...}   and 1 x 9 on another rank: one row of packed documents
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import LEFT_OUT
from fxdp.capture.ragged_rows import Rows, has_rows
from fxdp.eager.ragged.kinds import packed_tokens, rows_by_key
from fxdp.eager.ragged.structure import within


def recognised_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return `batch_dims` of a call by the keys of its mappings; None if no key tells of several axes."""
    found = tuple(_dims(value, f"args[{i}]") for i, value in enumerate(args)), _dims(kwargs, "")
    return found if has_rows(found) else None


def is_packed(value: Any) -> bool:
    """Return whether there are packed documents in a call's arguments."""
    if isinstance(value, Mapping):
        return bool(packed_tokens.rows(value)) or any(map(is_packed, value.values()))
    return isinstance(value, (list, tuple)) and any(map(is_packed, value))


def tells_of_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a batch cannot mean samples along dim 0, or has several documents in one row."""
    return _has_several_sizes(args, kwargs) or _begins_anew((args, kwargs))


def _dims(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        told = {key: rows for key, rows in rows_by_key(value).items() if isinstance(value.get(key), Tensor)}
        if packed_tokens.rows(value):  # a rank's first one begins on it
            told["position_ids"] = Rows("tokens", dim=1, within="documents")
        return {
            key: within(told[key], path) if key in told else _dims(one, f"{path}[{key!r}]")
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return tuple(_dims(one, f"{path}[{i}]") for i, one in enumerate(value))
    return LEFT_OUT


def _has_several_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return len({len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}) > 1


def _begins_anew(value: Any) -> bool:
    """Return whether positions within one row count from 0 again: there are several documents in it."""
    if isinstance(value, Mapping):
        if packed_tokens.rows(value):
            positions: Tensor = value["position_ids"]
            return not positions.is_meta and bool((positions[0, 1:] == 0).any())
        return any(map(_begins_anew, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_begins_anew, value))
