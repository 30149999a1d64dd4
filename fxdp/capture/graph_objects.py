"""Graphs of torch_geometric as containers of torch's pytree: `Data`, `Batch`, `HeteroData`.

    Batch(x=[5, 2], edge_index=[2, 8], y=[3], batch=[5], ptr=[4])    leaves x, edge_index, y, batch, ptr

A program has the sizes of the global batch as symbols, so such an object is made of its tensors alone: what
it knows of one rank's batch beside these, as its number of graphs, is left out, and read from `ptr` again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

OF_ONE_BATCH = ("_slice_dict", "_inc_dict")
"""What takes a batch apart into the graphs of this rank."""
_COUNTED = ("x", "pos", "batch")
"""Tensors by which an object counts its nodes."""
_Place = tuple[int, str, str]
"""The number of a store, a value's key in it, and the value's name."""


def is_graph(value: Any) -> bool:
    """Return whether a value is a graph or a batch of graphs."""
    kind = type(value)
    return hasattr(kind, "__cat_dim__") and hasattr(kind, "__inc__") and hasattr(value, "stores")


def has_graphs(value: Any) -> bool:
    """Return whether there are graphs in a call's arguments."""
    if isinstance(value, Mapping):
        return any(map(has_graphs, value.values()))
    return any(map(has_graphs, value)) if isinstance(value, (list, tuple)) else is_graph(value)


def name_in(store: Any, key: str) -> str:
    """Return the name of a value: its key, and before it the type of its nodes or edges if it has one."""
    name = getattr(store, "_key", None)
    return key if name is None else f"{name}.{key}"


def named_values(graph: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield store, key, name and value of what a program gets of a graph."""
    for store in graph.stores:
        counted = any(isinstance(store.get(key), Tensor) for key in _COUNTED)
        for key, value in list(store.items()):
            if not (key == "num_nodes" and counted):
                yield store, key, name_in(store, key), value


def contents(value: Any) -> dict[str, Any] | None:
    """Return the values of a graph by name, as a prefix of it names them; None for all else."""
    return {name: one for _, _, name, one in named_values(value)} if is_graph(value) else None


def register_graph(cls: type) -> None:
    """Register a class of graphs with torch's pytree."""
    blanks: dict[tuple[_Place, ...], Any] = {}  # an object without values, by places

    def flatten_with_keys(graph: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[_Place, ...]]:
        numbers = {id(store): number for number, store in enumerate(graph.stores)}
        found = list(named_values(graph))
        places = tuple((numbers[id(store)], key, name) for store, key, name, _ in found)
        if places not in blanks:
            blanks[places] = _without_values(graph)
        return [(pytree.GetAttrKey(name), value) for _, _, name, value in found], places

    def flatten(graph: Any) -> tuple[list[Any], tuple[_Place, ...]]:
        named, places = flatten_with_keys(graph)
        return [value for _, value in named], places

    def unflatten(values: Iterable[Any], places: tuple[_Place, ...]) -> Any:
        made = copy.copy(blanks[places])
        stores = list(made.stores)
        for (number, key, _), value in zip(places, values, strict=True):
            stores[number][key] = value
            if key == "ptr" and isinstance(value, Tensor):
                vars(made)["_num_graphs"] = value.shape[0] - 1
        return made

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def _without_values(graph: Any) -> Any:
    """Return a copy that has its stores, without values and without what is of one batch alone."""
    made = copy.copy(graph)
    for holder in [made, *made.stores]:
        for name in (*OF_ONE_BATCH, "_num_graphs"):
            vars(holder).pop(name, None)
    for store in made.stores:
        for key in list(store.keys()):
            del store[key]
    return made
