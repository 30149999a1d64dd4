"""Images of a batch of which a rank has none, and so not even the keys: it gets tensors without rows.

    rank 0    {"input_ids": [2, 8], "pixel_values": [12, 96], "image_grid_thw": [3, 3]}
    rank 1    {"input_ids": [1, 8]}     -->    and "pixel_values": [0, 96], "image_grid_thw": [0, 3]

That is the part of rank 1 of one device's batch. Where no rank has an image nobody gets any: one device would
not call the layers that look at images, and their parameters would have no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.ir.types.value_types import dtype_name

Described = dict[str, tuple[str, tuple[int, ...]] | None]
"""The keys of a mapping, in order; of tensors of images also the dtype and the shape without rows."""


def images_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Described]:
    """Describe the images of each mapping of a call; an empty one where there is none."""
    return [_described(mapping) for mapping in _mappings(args, kwargs)]


def differ(told: Sequence[list[Described]]) -> bool:
    """Return whether some ranks have images of which others have not even the keys."""
    same_mappings = len({len(one) for one in told}) == 1
    return same_mappings and any(any(column) and not all(column) for column in zip(*told, strict=True))


def with_images(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: Sequence[list[Described]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call with images without rows where other ranks have some and this one has none."""
    if not told:
        return args, kwargs
    filled = {}
    for mapping, column in zip(_mappings(args, kwargs), zip(*told, strict=True), strict=True):
        filled[id(mapping)] = _filled(mapping, next((one for one in column if one), {}))
    return tuple(filled.get(id(arg), arg) for arg in args), filled[id(kwargs)]


def _mappings(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [kwargs, *(arg for arg in args if type(arg) is dict)]


def _described(mapping: Mapping[str, Any]) -> Described:
    from fxdp.eager.ragged.kinds import pictures

    rows = pictures.rows(mapping)
    return {key: _shape(value) if key in rows else None for key, value in mapping.items()} if rows else {}


def _shape(value: Tensor) -> tuple[str, tuple[int, ...]]:
    return dtype_name(value.dtype), tuple(value.shape[1:])


def _filled(mapping: Mapping[str, Any], described: Described) -> dict[str, Any]:
    """Return a mapping with all keys of images, in the order of another rank's mapping."""
    text = mapping.get("input_ids")
    added = {
        key: torch.empty(0, *one[1], dtype=getattr(torch, one[0]), device=text.device)
        for key, one in described.items()
        if one is not None and mapping.get(key) is None and isinstance(text, Tensor)
    }
    if not added:
        return dict(mapping)
    every = {**mapping, **added}
    return {key: every[key] for key in (*described, *every) if key in every}
