"""Gradients of parameters are reduced together, at the end of the backward.

    backward of the last layer     weight: a term of a sum, kept
    ...                            ...
    backward of the first layer    weight: a term of a sum, kept
    end of the backward            all_reduce of all terms in buckets, then into .grad of each parameter

Who could see a gradient earlier gets it earlier: `torch.autograd.grad`, a gradient of which a graph is made
(`create_graph`), hooks of parameters, and hooks of global tensors, before which all kept terms are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.redistribute import redistributed
from fxdp.eager.tensor import GlobalTensor
from fxdp.ir.types.placements import P, R
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import backward_id, call_after_backward, will_accumulate

_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class _Term:
    """This rank's term of the gradient of a leaf; `order` is equal on all ranks."""

    order: int
    leaf: Tensor
    value: Tensor


class _Pending:
    """The terms of one backward that are not reduced yet."""

    def __init__(self, ranks: DataRanks) -> None:
        self.ranks = ranks
        self.terms: list[_Term] = []

    def reduce(self) -> None:
        """Reduce all terms, and accumulate them; a collective call if there are any."""
        terms, self.terms = sorted(self.terms, key=lambda term: term.order), []
        with torch.no_grad():
            for bucket in _buckets(terms):
                for term, gradient in zip(bucket, self._reduced(bucket), strict=True):
                    _accumulate(term.leaf, gradient)

    def end(self) -> None:
        """Reduce what is left, and let go of the parameters' global values."""
        self.ranks.let_go_of_parameters()
        self.reduce()

    def _reduced(self, bucket: list[_Term]) -> Iterator[Tensor]:
        parts = [term.value.reshape(-1) for term in bucket]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        type_ = TensorType(flat.dtype, tuple(flat.shape))
        reduced = redistributed(flat, type_, P, R, self.ranks.unit, "gradients")
        for term, part in zip(bucket, torch.split(reduced, [len(part) for part in parts]), strict=True):
            yield part.view(term.leaf.shape)


_PENDING: WeakValueDictionary[int, _Pending] = WeakValueDictionary()
"""By backward, which keeps what is pending alive: if it fails, the terms are gone with it."""


def pending(ranks: DataRanks) -> _Pending:
    """Return what the backward that runs has not reduced yet."""
    number = backward_id()
    found = _PENDING.get(number)
    if found is None:
        found = _PENDING[number] = _Pending(ranks)
        call_after_backward(found.end)
    return found


def keep_term(entry: Any, grad: Tensor) -> bool:
    """Keep a term of a leaf's gradient, to be reduced later; False if it cannot wait, and nothing is kept.

    `entry` is the node of the graph by which the leaf entered: it has the `leaf`, its `axis`, and its number
    `order`, equal on all ranks: a backward may take another way on each.
    """
    leaf, ranks = entry.leaf, entry.axis.ranks
    kept = pending(ranks)
    if (
        ranks.world == 1
        or kept.ranks is not ranks
        or type(grad) is not GlobalTensor
        or grad._spec.placement != P
        or torch.is_grad_enabled()
        or leaf._backward_hooks
        or leaf._post_accumulate_grad_hooks
        or grad.dtype != leaf.dtype
        or not (leaf.grad is None or type(leaf.grad) in (Tensor, torch.nn.Parameter))
        or not will_accumulate(entry.next_functions[0][0])
    ):
        return False
    kept.terms.append(_Term(entry.order, leaf, grad.local))
    return True


def reduce_pending() -> None:
    """Reduce what the backward that runs has kept so far, so that `.grad` is what it is on one device."""
    found = _PENDING.get(backward_id())
    if found is not None and found.terms:
        found.reduce()


def _buckets(terms: list[_Term]) -> Iterator[list[_Term]]:
    kinds: dict[Any, list[_Term]] = {}
    for term in terms:
        kinds.setdefault((term.value.dtype, term.value.device), []).append(term)
    for of_kind in kinds.values():
        bucket: list[_Term] = []
        size = 0
        for term in of_kind:
            if bucket and size + term.value.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(term)
            size += term.value.nbytes
        yield bucket


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)  # in the parameter's memory order, of its own
    elif leaf.grad.layout is not torch.strided:
        leaf.grad = gradient + leaf.grad  # a sparse gradient and a dense one make a dense one
    else:
        leaf.grad += gradient
