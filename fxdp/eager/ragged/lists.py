"""Lists with one element per row: images of different sizes, dicts of boxes. Each rank gets all elements.

An element has sizes of its own, so no dim is a batch: the global list is the ranks' lists, one after another,
and its tensors are equal on all ranks, as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.autograd.gradients import replicated
from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.local_parts import entered
from fxdp.eager.tensor import wrapped

_PLAIN = (bool, int, float, str)


def gathered_list(own: Sequence[Any], ranks: DataRanks, *, keeps_graph: bool) -> Any:
    """Return all ranks' elements in rank order; a collective call. Tensors travel by dtype, joined."""
    tensors: list[Tensor] = []
    shapes = ranks.gather([_described(one, tensors) for one in own])
    by_dtype = {
        dtype: _joined([t for t in tensors if str(t.dtype) == dtype], dtype, ranks, keeps_graph)
        for dtype in sorted({name for described in shapes for one in described for name in _dtypes(one)})
    }
    taken = dict.fromkeys(by_dtype, 0)
    found = [_rebuilt(one, by_dtype, taken, ranks) for described in shapes for one in described]
    return tuple(found) if isinstance(own, tuple) else found


def is_plain_list(value: Any) -> bool:
    """Return whether a value is a list of text, numbers and containers of these, or a tuple of text."""
    if type(value) is tuple:
        return all(isinstance(one, str) for one in value)
    return type(value) is list and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(one) for item in value.items() for one in item)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in _PLAIN


def joined_lists(
    every: Sequence[Mapping[str, Any]], axes: Iterable[Sequence[int]]
) -> dict[str, list[Any] | tuple[Any, ...]]:
    """Return the lists that differ between ranks and have an element for each row of an axis, by path.

    Parameters
    ----------
    every : the lists of each rank.
    axes : the sizes of each axis on the ranks.
    """
    found: dict[str, list[Any] | tuple[Any, ...]] = {}
    sizes = {tuple(one) for one in axes}
    for path, first in every[0].items():
        of_ranks = [one[path] for one in every if path in one]
        if tuple(map(len, of_ranks)) in sizes and any(one != first for one in of_ranks):
            found[path] = type(first)(element for one in of_ranks for element in one)
    return found


def untold(value: Any) -> Any:
    """Return a part of an element that cannot be told to other ranks; None if there is none."""
    if value is None or isinstance(value, (*_PLAIN, Tensor)):
        return None
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return next((found for found in map(untold, value) if found is not None), None)
    return value


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Return an element without its tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", str(value.dtype), tuple(value.shape))
    if isinstance(value, Mapping):
        return ("dict", [(key, _described(one, tensors)) for key, one in value.items()])
    if isinstance(value, (list, tuple)):
        return ("tuple" if isinstance(value, tuple) else "list", [_described(one, tensors) for one in value])
    return ("plain", value)


def _dtypes(one: Any) -> Iterator[str]:
    if one[0] == "tensor":
        yield one[1]
    elif one[0] != "plain":
        for inner in one[1]:
            yield from _dtypes(inner[1] if one[0] == "dict" else inner)


def _joined(tensors: list[Tensor], dtype: str, ranks: DataRanks, keeps_graph: bool) -> Tensor:
    """Return all elements of all ranks' tensors of one dtype, as one plain vector, equal on all ranks."""
    kind = getattr(torch, dtype.partition(".")[2])
    device = tensors[0].device if tensors else torch.device(ranks.mesh.device_type)
    own = torch.cat([torch.empty(0, dtype=kind, device=device), *(t.reshape(-1) for t in tensors)])
    axis = ranks.axis([row[0] for row in ranks.exchange((own.numel(),))])
    return entered(own, axis, 0, keeps_graph=keeps_graph).full()


def _rebuilt(one: Any, by_dtype: Mapping[str, Tensor], taken: dict[str, int], ranks: DataRanks) -> Any:
    kind, *rest = one
    if kind == "plain":
        return rest[0]
    if kind == "tensor":
        dtype, shape = rest
        start, size = taken[dtype], math.prod(shape)
        taken[dtype] = start + size
        full = by_dtype[dtype].narrow(0, start, size).reshape(shape)
        return replicated(full, ranks.unit) if full.requires_grad else wrapped(full, ranks.unit)
    if kind == "dict":
        return {key: _rebuilt(value, by_dtype, taken, ranks) for key, value in rest[0]}
    items = [_rebuilt(value, by_dtype, taken, ranks) for value in rest[0]]
    return tuple(items) if kind == "tuple" else items
