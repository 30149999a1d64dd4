"""Kinds of ragged structures that are recognised, one file for each.

An object has `matches` and `fields`; of a mapping, `rows` tells by its keys, and of lists by their elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fxdp.capture.graph_objects import is_graph
from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds import bags, detection, geometric, nested, packed, packed_tokens, pictures
from fxdp.eager.ragged.kinds.object_fields import Largest, ObjectFields

_OBJECTS: tuple[tuple[Callable[[Any], bool], Callable[[Any], ObjectFields]], ...] = (
    (is_graph, geometric.fields),
    (packed.matches, packed.fields),
    (nested.matches, nested.fields),
)
_MAPPINGS: tuple[Callable[[Mapping[Any, Any]], dict[str, Rows | Largest]], ...] = (
    packed_tokens.rows, pictures.rows, bags.rows,
)  # fmt: skip


def is_recognised(value: Any) -> bool:
    """Return whether an object is of a kind that is recognised."""
    return any(matches(value) for matches, _ in _OBJECTS)


def fields_of(value: Any) -> ObjectFields | None:
    """Return the fields of an object of a kind that is recognised; None for all else.

    Raises
    ------
    InputError : an object of such a kind that no concatenation can be of.
    """
    return next((fields(value) for matches, fields in _OBJECTS if matches(value)), None)


def fields_in_place(value: Any) -> ObjectFields | None:
    """Return the fields of one device's object; None where its kind arranges its tensors anew."""
    return geometric.fields_in_place(value) if is_graph(value) else None


def rows_by_key(mapping: Mapping[Any, Any]) -> dict[str, Rows | Largest]:
    """Return what the values of a mapping hold, where its keys tell."""
    return next((found for kind in _MAPPINGS if (found := kind(mapping))), {})


rows_of_lists = detection.rows
"""Returns what lists with one element per image hold, by key or index in what holds them."""
