"""Rules written as labels on dims, as in einsum: one description serves forward and backward ops.

A string per operand and per output names the dims, one letter each; `_` is a dim that must stay unsharded,
and `...` any number of unsharded dims. A letter `l` makes a promise, which the family's docstring states for
its ops: an output with `l` depends, at index `i` of `l`, only on the operands' slices at `i`; an output
without `l` is the sum over `i` of such terms. Hence any split of `l` is exact: operands with `l` are sharded
on it and all remaining ones full; outputs with `l` are sharded, outputs without `l` are partial.

    mm              mk, kn          -> mn         k contracted: P
    convolution     n..., ...       -> n...
    its backward    n..., n..., ... -> n..., ..., _      gradients of weight and bias: P
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from string import ascii_letters
from typing import TypeAlias

from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, P, Placement, Shard
from fxdp.ir.types.sizes import batch_factor
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.registry import Alternative, Op, Operand

_Labelled: TypeAlias = Iterable[tuple[Operand | None, str]]
_Places: TypeAlias = list[tuple[Operand, int]]


def letters(count: int, full: Collection[int] = ()) -> str:
    """Return the first `count` letters, with `_` for the dims in `full`, which must stay unsharded."""
    return "".join("_" if dim in full else name for dim, name in enumerate(ascii_letters[:count]))


def filled(labels: str, ndim: int) -> str:
    """Return `labels` for `ndim` dims, with `...` replaced by as many `_`."""
    return labels.replace("...", "_" * (ndim - len(labels) + 3))


def trailing(labels: str, ndim: int) -> str:
    """Align `labels` at the last dim, like broadcasting; cut them, or pad them with `_`, in front."""
    return "_" * (ndim - len(labels)) + labels[max(len(labels) - ndim, 0) :]


def by_labels(
    op: Op,
    inputs: _Labelled,
    outputs: str | Sequence[str | Placement],
    *,
    broadcast: bool = False,
    addends: Sequence[Operand] = (),
    unread: Sequence[Operand | None] = (),
    rewrite: Rewrite | None = None,
) -> Iterator[Alternative]:
    """Yield one alternative per label of batch size and per factorisation `outer` that an operand has.

    Operands without labels are full. All dims of one label must have equal size; with `broadcast` a dim of
    size 1 is complete too. An addend is added once, so it is partial where the outputs are. Values of
    `unread` operands do not matter. An output may have a fixed placement instead of labels; a single string
    is for every output.
    """
    outputs = [outputs] * len(op.outputs) if isinstance(outputs, str) else outputs
    places: dict[str, _Places] = {}
    for operand, labels in inputs:
        if operand is not None:
            for dim, label in enumerate(filled(labels, operand.ndim)):
                if label != "_":
                    places.setdefault(label, []).append((operand, dim))
    ignored: dict[int, Placement | None] = {o.index: None for o in unread if o is not None}
    for label, found in places.items():
        size = _common_size(found, broadcast)
        if size is None:
            continue
        for outer in _outers(found):
            results = _results(op.outputs, outputs, label, size, outer)
            if results is None:
                continue
            chosen = dict(ignored)
            if P in results:
                chosen.update((o.index, P) for o in addends)
            chosen.update((o.index, Shard(d, outer)) for o, d in found if o.shape[d] == size)
            yield op.alternative(chosen, results, rewrite)


def linear(op: Op, *groups: Sequence[Operand | None]) -> Iterator[Alternative]:
    """Yield alternatives from `P` to `P`: the outputs are linear in each group of operands taken together.

    A group without a partial value is left out, because making a full value partial gains nothing.
    """
    for group in groups:
        operands = [o for o in group if o is not None]
        if any(P in o.placements for o in operands):
            yield op.alternative({o.index: P for o in operands}, P)


def _common_size(places: _Places, broadcast: bool) -> Dim | None:
    """Return the common size of all dims of a label, if it is a multiple of the batch, else None."""
    sizes = {o.shape[d] for o, d in places}
    if broadcast:
        sizes.discard(1)
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    # a dim of fixed size does not count samples: no rank has a part of it
    return size if batch_factor(size) is not None else None


def _outers(places: _Places) -> dict[Dim, None]:
    # one block is always worth a try; several only if a value exists in as many blocks
    found: dict[Dim, None] = {1: None}
    for operand, dim in places:
        for shard in operand.shards:
            if shard.dim == dim:
                found[shard.outer] = None
    return found


def _results(
    types: Sequence[TensorType | None],
    outputs: Sequence[str | Placement],
    label: str,
    size: Dim,
    outer: Dim,
) -> tuple[Placement | None, ...] | None:
    results: list[Placement | None] = []
    for type_, labels in zip(types, outputs, strict=True):
        if type_ is None:
            results.append(None)
        elif not isinstance(labels, str):
            results.append(labels)
        else:
            dim = filled(labels, len(type_.shape)).find(label)
            if dim < 0 or type_.shape[dim] == 1:  # summed over, with or without keepdim
                results.append(P)
            elif type_.shape[dim] == size:
                results.append(Shard(dim, outer))
            else:
                return None
    return tuple(results)
