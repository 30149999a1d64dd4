"""When sums over the ranks are reduced: small ones when they are made, or several when one is needed.

outside of a backward       x.sum()              reduced at once: `item()` by one rank sends nothing
in a backward               grad.sum(0)          when an op needs it; most are of parameters, and wait
in a decomposition          total / weight       when an op needs one of them: both in one message
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.redistribute import redistributed
from fxdp.eager.spec import GlobalSpec, spec_of
from fxdp.eager.tensor import GlobalTensor
from fxdp.ir.types.placements import P, R
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import backward_id

SMALL = 1024
"""The most elements of a sum that is reduced when it is made, so that reading it sends nothing."""
_TOGETHER = 1 << 20
"""The most elements of a sum that is copied in order to travel with others."""


def made(values: Sequence[GlobalTensor], ranks: DataRanks, cause: str) -> None:
    """Reduce small sums that an op has just made, unless they may wait."""
    if ranks.held is not None:
        ranks.held += values
    elif not _in_plain_backward():
        summed(values, ranks, cause)


def _in_plain_backward() -> bool:
    """Return whether a backward runs of which no graph is made."""
    return backward_id() >= 0 and not torch.is_grad_enabled()


def summed(values: Sequence[GlobalTensor], ranks: DataRanks, cause: str) -> list[Tensor]:
    """Return the reduced local values of sums, which from now on are full; a collective call.

    Sums that are held are reduced in the same message.
    """
    if ranks.world == 1:
        return [value._local for value in values]
    found = {id(value): value for value in (*values, *(ranks.held or ())) if value._spec.placement == P}
    reduced = dict(zip(found, _reduced([one._local for one in found.values()], ranks, cause), strict=True))
    for number, value in found.items():
        if value._memory is None and value._origin is None:  # no view shares its memory
            value._local, value._spec = reduced[number], _full(value._spec)
    return [reduced.get(id(value), value._local) for value in values]


def holding(ranks: DataRanks, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with small sums held until an op or the caller needs one of them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if ranks.held is not None:
            return function(*args, **kwargs)
        ranks.held = []
        try:
            results = function(*args, **kwargs)
        finally:
            ranks.held = None
        if not _in_plain_backward():
            reduce_small(results, cause)
        return results

    return run


def reduce_small(values: Any, cause: str) -> None:
    """Reduce the small sums among values that the user gets, in one message."""
    several = values if isinstance(values, (list, tuple)) else (values,)
    small = [
        value
        for value in several
        if isinstance(value, GlobalTensor) and value._spec.placement == P and value._local.numel() <= SMALL
    ]
    if small:
        summed(small, small[0]._spec.axis.ranks, cause)


def _reduced(locals_: Sequence[Tensor], ranks: DataRanks, cause: str) -> Iterable[Tensor]:
    """Reduce values, those of one dtype in one message."""
    found: list[Tensor] = list(locals_)
    kinds: dict[Any, list[int]] = {}
    for i, local in enumerate(locals_):
        alone = i if local.numel() > _TOGETHER else None
        kinds.setdefault((local.dtype, local.device, alone), []).append(i)
    for places in kinds.values():
        parts = [locals_[i] for i in places]
        if len(parts) == 1:
            found[places[0]] = _all_reduced(parts[0], ranks, cause)
            continue
        flat = _all_reduced(torch.cat([part.reshape(-1) for part in parts]), ranks, cause)
        sizes = [part.numel() for part in parts]
        for i, part, one in zip(places, parts, torch.split(flat, sizes), strict=True):
            found[i] = one.view(part.shape)
    return found


def _all_reduced(local: Tensor, ranks: DataRanks, cause: str) -> Tensor:
    return redistributed(local, TensorType(local.dtype, tuple(local.shape)), P, R, ranks.unit, cause)


def _full(spec: GlobalSpec) -> GlobalSpec:
    return spec_of(spec.dtype, spec.shape, spec.stride, spec.device, spec.axis.full)
