"""What the keys of plain inputs tell of a compiled call: `batch_dims` of packed documents, images and bags.

One size along dim 0 of all tensors means samples, as ever. Keys are read where that cannot be meant:

    {"input": [7], "offsets": [3]}               two sizes on a rank: bags
    {"input_ids": [1, 5], "position_ids": ...}   and 1 x 9 on another rank: one row of packed documents

A graph of torch_geometric cannot mean samples at all; beside one, sizes tell the axes of other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import LEFT_OUT
from fxdp.capture.graph_objects import has_graphs, is_graph
from fxdp.capture.ragged_rows import Rows, has_rows
from fxdp.eager.ragged.axes_by_size import Gather, decided, open_axis
from fxdp.eager.ragged.kinds import geometric, packed_tokens, rows_by_key
from fxdp.eager.ragged.structure import within


def recognised_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any], gather: Gather | None = None) -> Any:
    """Return `batch_dims` of a call by the keys of its mappings; None if no key tells of several axes.

    `gather` returns all ranks' values, of which the axes of tensors beside graphs are known; without it each
    of these has one of its own.
    """
    beside = has_graphs((args, kwargs))
    found = (
        tuple(_dims(value, f"args[{i}]", beside) for i, value in enumerate(args)),
        _dims(kwargs, "", beside),
    )
    if not has_rows(found):
        return None
    return decided(found, (args, kwargs), gather) if beside and gather is not None else found


def is_packed(value: Any) -> bool:
    """Return whether there are packed documents in a call's arguments."""
    if isinstance(value, Mapping):
        return bool(packed_tokens.rows(value)) or any(map(is_packed, value.values()))
    return isinstance(value, (list, tuple)) and any(map(is_packed, value))


def tells_of_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a batch cannot mean samples along dim 0, or has several documents in one row."""
    several = has_graphs((args, kwargs)) or _has_several_sizes(args, kwargs)
    return several or _begins_anew((args, kwargs))


def _dims(value: Any, path: str, beside: bool) -> Any:
    """Return the part of `batch_dims`; `beside`: there are graphs in the call, so nothing means samples."""
    if is_graph(value):
        return {name: _of_graph(name, rows, path) for name, rows in geometric.rows_of_program(value).items()}
    if isinstance(value, Mapping):
        told = {key: rows for key, rows in rows_by_key(value).items() if isinstance(value.get(key), Tensor)}
        if packed_tokens.rows(value):  # a rank's first one begins on it
            told["position_ids"] = Rows("tokens", dim=1, within="documents")
        return {
            key: within(told[key], path) if key in told else _dims(one, f"{path}[{key!r}]", beside)
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return tuple(_dims(one, f"{path}[{i}]", beside) for i, one in enumerate(value))
    if beside and isinstance(value, Tensor):
        return Rows(open_axis(path)) if value.dim() else None
    return LEFT_OUT


def _of_graph(name: str, rows: Rows | None, path: str) -> Rows | None:
    found: Rows | None = within(rows, path)
    is_open = rows is not None and rows.axis == name
    return replace(found, axis=open_axis(f"{path}.{name}")) if found is not None and is_open else found


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
