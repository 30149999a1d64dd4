"""Detection: a list of images of different sizes, and a list with a dict of boxes for each.

([image, image], [{"boxes": [3, 4], "labels": [3]}, {"boxes": [0, 4], "labels": [0]}])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxdp.capture.ragged_rows import Rows

_OF_OBJECTS = ("boxes", "masks", "class_labels")
_IMAGE_DIMS = 3


def rows(holder: Mapping[Any, Any]) -> dict[Any, Rows]:
    """Return what lists with one element per image hold, by key; empty without a list of dicts of objects."""
    lists = {key: value for key, value in holder.items() if isinstance(value, (list, tuple)) and value}
    targets = {key: value for key, value in lists.items() if all(map(_has_objects, value))}
    counts = {len(value) for value in targets.values()}
    images = {
        key
        for key, value in lists.items()
        if len(value) in counts and all(isinstance(t, Tensor) and t.dim() == _IMAGE_DIMS for t in value)
    }
    return {key: Rows("samples", dim=None) for key in (*targets, *images)}


def _has_objects(target: Any) -> bool:
    return isinstance(target, Mapping) and any(isinstance(target.get(key), Tensor) for key in _OF_OBJECTS)
