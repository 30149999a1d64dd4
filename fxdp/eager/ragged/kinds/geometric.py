"""Graphs of torch_geometric: `Data`, `Batch` and `HeteroData`, by their own methods, without its import.

`__cat_dim__(key, value, store)` says along which dim batches of graphs are concatenated, `__inc__` by how
much values are increased for each graph: so the ranks' batches are concatenated as graphs are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.graph_objects import OF_ONE_BATCH, name_in, named_values
from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds.object_fields import ObjectFields
from fxdp.errors import InputError

_NODES = ("x", "pos", "batch")
_EDGES = ("edge_index", "edge_attr", "edge_weight", "edge_type")


def fields(data: Any) -> ObjectFields:
    """Return the values of a graph or of a batch of graphs.

    Raises
    ------
    InputError : a sampled subgraph, whose seed nodes are the first ones, or a sparse matrix of its nodes.
    """
    _check(data)
    stores = list(data.stores)
    in_place = fields_in_place(data)
    counts = [] if _has_events(data) else list(_counts(data, stores))

    def make(given: list[Any]) -> Any:
        made = in_place.make(given[: len(in_place.values)])
        holders = [made, *made.stores]
        for holder in holders:
            for name in vars(holder).keys() & set(OF_ONE_BATCH):
                vars(holder)[name] = _GraphsOfRanks()
        for (name, *_), one in zip(counts, given[len(in_place.values) :], strict=True):
            for holder in holders:
                if name == "num_graphs" and "_num_graphs" in vars(holder):
                    vars(holder)["_num_graphs"] = one
        return made

    return ObjectFields([*in_place.values, *counts], make)


def fields_in_place(data: Any) -> ObjectFields:
    """Return the values of one device's graph or batch, which keeps all that it knows beside them."""
    values: list[tuple[str, Any, Any]] = []
    places: list[tuple[int, str]] = []
    for i, store in enumerate(data.stores):
        for key, value in list(store.items()):
            rows = _rows(data, store, key, value)
            if rows is not None:
                values.append((name_in(store, key), value, rows))
                places.append((i, key))

    def make(given: list[Any]) -> Any:
        made = copy.copy(data)
        for (i, key), value in zip(places, given, strict=True):
            made.stores[i][key] = value
        return made

    return ObjectFields(values, make)


def rows_of_program(data: Any) -> dict[str, Rows | None]:
    """Return what each value holds that a program gets; the axis of a value that no key tells is its name.

    Raises
    ------
    InputError : a sampled subgraph, a sparse matrix, or nodes of which no tensor has a row for each.
    """
    _check(data)
    found: dict[str, Rows | None] = {}
    for store, key, name, value in named_values(data):
        if key == "num_nodes":
            raise InputError(
                f"{type(data).__name__}.{name} is the number of this rank's nodes, and no tensor has a row "
                "for each node; expected x, pos or batch beside it, by which all ranks' nodes are counted"
            )
        found[name] = _rows(data, store, key, value)
    return found


class _GraphsOfRanks:
    """In the place of what takes a batch apart: where each graph's values end only its rank knows."""

    def keys(self) -> Any:
        """Raise: torch_geometric asks for these first."""
        raise InputError(
            "the graphs of a global batch cannot be taken out of it (to_data_list(), get_example(), "
            "batch[i]); expected unbatch(x, batch) and unbatch_edge_index(edge_index, batch) of "
            "torch_geometric.utils"
        )


def _check(data: Any) -> None:
    seeds = next((store["batch_size"] for store in data.stores if "batch_size" in store), None)
    if seeds is not None:
        raise InputError(
            f"{type(data).__name__}.batch_size: the first {seeds} nodes of this rank are seeds, but in the "
            "global batch the nodes of earlier ranks come first; expected a mask of the seeds: data.seed = "
            "torch.arange(data.num_nodes) < data.batch_size; del data.batch_size"
        )
    for store in data.stores:
        for key, value in store.items():
            if _is_matrix(value):
                raise InputError(
                    f"{type(data).__name__}.{name_in(store, key)} is a sparse matrix of this rank's nodes; "
                    "expected edge_index, of which torch_geometric.transforms.ToSparseTensor()(data) makes "
                    "the matrix of all nodes where the batch is global"
                )


def _is_matrix(value: Any) -> bool:
    return hasattr(value, "sparse_sizes") or (isinstance(value, Tensor) and value.layout != torch.strided)


def _rows(data: Any, store: Any, key: str, value: Any) -> Rows | None:
    """Return what one value holds; None: it is of no graph, and equal on all ranks."""
    if key == "num_nodes":
        return Rows(_nodes(store)) if isinstance(value, int) else None
    if isinstance(value, (list, tuple)):
        return Rows(name_in(store, key), dim=None)
    if not isinstance(value, Tensor) or value.dim() == 0 or _is_matrix(value):
        return None
    if _has_events(data):
        return Rows("events")
    axis, dim = _axis(store, key), data.__cat_dim__(key, value, store)
    if key == "ptr" or key.endswith("_ptr"):
        return Rows("graphs", bounds=_nodes(store) if key == "ptr" else _axis(store, key[: -len("_ptr")]))
    if key == "batch" or key.endswith("_batch"):
        return Rows(axis if key == "batch" else _axis(store, key[: -len("_batch")]), into="graphs")
    return Rows(axis, dim=dim or 0, into=_targets(data, store, key, value))


def _has_events(data: Any) -> bool:
    """Return whether rows are events of one graph, whose nodes all ranks number alike: a `TemporalData`."""
    return hasattr(type(data), "num_events")


def _targets(data: Any, store: Any, key: str, value: Tensor) -> str | tuple[str, ...] | None:
    """Return the axes into which values point; those with a name of their own are `_counts`."""
    more = _increase(data, store, key, value)
    ends = getattr(store, "_key", None)
    if key == "edge_index" and isinstance(ends, tuple):
        return f"nodes of {ends[0]}", f"nodes of {ends[-1]}"
    if isinstance(more, Tensor) and more.numel() > 1:
        return tuple(f"targets of {name_in(store, key)}[{i}]" for i in range(more.numel()))
    if "index" in key or key == "face":
        return _nodes(store) if int(more) == _count(store) else f"targets of {name_in(store, key)}"
    return f"targets of {name_in(store, key)}" if int(more) else None


def _increase(data: Any, store: Any, key: str, value: Tensor) -> Any:
    """Return by how much values of graphs after these are increased: one number, or one for each row."""
    name = getattr(store, "_key", None)
    known = getattr(data, "_inc_dict", None)
    before = None if known is None else (known if name is None else known.get(name, {})).get(key)
    if before is None:
        return data.__inc__(key, value, store)
    last = data.get_example(data.num_graphs - 1)  # `__inc__` is written for one graph
    of_last = next(one for one in last.stores if getattr(one, "_key", None) == name)
    return before[-1] + last.__inc__(key, of_last[key], of_last)


def _counts(data: Any, stores: list[Any]) -> Iterator[tuple[str, int, Rows]]:
    """Yield the sizes of the axes that may have no tensor."""
    for store in stores:
        for key, value in list(store.items()):
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            rows = _rows(data, store, key, value)
            own = [name for name in rows.targets if name.startswith("targets of")] if rows is not None else []
            sizes = _increase(data, store, key, value) if own else 0
            listed = sizes.flatten().tolist() if isinstance(sizes, Tensor) else [int(sizes)]
            yield from ((name, size, Rows(name)) for name, size in zip(own, listed, strict=False))
        if _counts_nodes(store):
            yield f"{_nodes(store)}.num_nodes", _count(store) or 0, Rows(_nodes(store))
    graphs = _graphs(data, stores)
    if graphs is not None:
        yield "num_graphs", graphs, Rows("graphs")


def _counts_nodes(store: Any) -> bool:
    """Return whether a store has nodes of its own, and does not say their number among its values."""
    has_edges = isinstance(getattr(store, "_key", None), tuple)
    return not has_edges and len(store) > 0 and _count(store) is not None


def _count(store: Any) -> int | None:
    """Return the number of a store's nodes; None if it has none, as what is of a full typed graph."""
    found: int | None = getattr(store, "num_nodes", None)
    return found


def _graphs(data: Any, stores: list[Any]) -> int | None:
    known = getattr(data, "num_graphs", None)
    if known is not None:
        return int(known)
    batch = next((store["batch"] for store in stores if "batch" in store), None)
    return None if batch is None else int(batch.max()) + 1 if batch.numel() else 0


def _axis(store: Any, key: str) -> str:
    if key in _NODES:
        return _nodes(store)
    return name_in(store, "edges" if key in _EDGES else key)


def _nodes(store: Any) -> str:
    name = getattr(store, "_key", None)
    return "nodes" if name is None else f"nodes of {name}"
