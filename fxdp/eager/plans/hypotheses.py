"""Which sizes of a call count the batch: hypotheses that prove themselves on meta tensors.

A rule takes sizes as expressions in `B`, but an eager call has ints. A sharded operand says which of its dims
counts the batch. Of full operands (noise, labels, `eye(2 * n)`) and of integer arguments (`view(8, -1)`), an
8 may count samples or not, so hypotheses are tried:

    x: [8, 6] in S(0)    x.view(8, -1)       none: fails for 10 samples     8 = B: [10, 6], [13, 6]: holds

A hypothesis holds if the op runs on meta tensors at several batch sizes, with results whose sizes are linear
in the batch. Then the call is one of a family, for which a rule is exact at every batch size, this one
included. So a wrong guess costs a gather and never a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.plans.call_leaves import CallLeaves
from fxdp.eager.plans.sparse_layouts import stays_plain
from fxdp.ir.types.placements import Dim, Placement, Shard
from fxdp.ir.types.sizes import B, evaluate
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import OpOverload, aten

_MORE = (2, 5)
"""By how many samples the further batches are larger."""
_META = torch.device("meta")
AS_RESHAPE: Mapping[OpOverload, OpOverload] = {
    aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default,
}  # fmt: skip
"""Ops that a part, whose strides may differ from the global value's, runs as another op."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Sizes that count the batch: of full operands, by `(operand, dim)`, and among the integer arguments."""

    dims: tuple[tuple[tuple[int, int], Dim], ...] = ()
    sizes: tuple[tuple[int, Dim], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call: its type in `B`, and its strides and device on one device."""

    type: TensorType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device


def hypotheses(
    leaves: CallLeaves, placements: Sequence[Placement], axis: BatchAxis | None
) -> Iterator[Hypothesis]:
    """Yield the hypotheses on a call, the likeliest first; `axis` is None if no operand is sharded."""
    yield Hypothesis()
    if axis is None:
        return
    seen = {Hypothesis()}
    for one in _likely(leaves, placements, axis.total):
        if one not in seen:
            seen.add(one)
            yield one


def _likely(leaves: CallLeaves, placements: Sequence[Placement], batch: int) -> Iterator[Hypothesis]:
    tensors = leaves.tensors
    known = {tensors[i].shape[p.dim] for i, p in enumerate(placements) if isinstance(p, Shard)} | {batch}
    multiples = {i: _in_batches(n, batch) for i, n in enumerate(leaves.sizes) if n > 0 and n % batch == 0}
    equal = {i: size for i, size in multiples.items() if leaves.sizes[i] in known}
    spots = {
        (i, dim): _in_batches(n, batch)
        for i, tensor in enumerate(tensors)
        if not isinstance(placements[i], Shard)
        for dim, n in enumerate(tensor.shape)
        if n in known
    }
    first = {spot: size for spot, size in spots.items() if spot[1] == 0}
    for i, size in multiples.items():
        yield Hypothesis((), ((i, size),))
    for dims in (first, spots, *({spot: size} for spot, size in spots.items())):
        for sizes in ({}, *({i: size} for i, size in equal.items())):
            yield Hypothesis(tuple(dims.items()), tuple(sizes.items()))
    yield Hypothesis((), tuple(multiples.items()))
    yield Hypothesis(tuple(first.items()), tuple(multiples.items()))


def _in_batches(size: int, batch: int) -> Dim:
    factor: Any = size // batch
    return factor * B


def operand_types(
    leaves: CallLeaves, known: Sequence[TensorType], hypothesis: Hypothesis
) -> tuple[TensorType, ...]:
    """Return the operands' types in `B` under a hypothesis; `known` are the types by placement alone."""
    shapes = [list(type_.shape) for type_ in known]
    for (operand, dim), size in hypothesis.dims:
        shapes[operand][dim] = size
    return tuple(TensorType(t.dtype, tuple(shape)) for t, shape in zip(known, shapes, strict=True))


def proven_results(
    op: OpOverload,
    leaves: CallLeaves,
    types: Sequence[TensorType],
    hypothesis: Hypothesis,
    axis: BatchAxis | None,
) -> tuple[Result | None, ...] | None:
    """Return the results as functions of `B`, from runs on meta tensors; None if there are none."""
    batch = 1 if axis is None else axis.total
    batches = (batch, *(batch + more for more in _MORE)) if axis is not None else (batch,)
    runs: list[list[Any]] = []
    for size in batches:
        found = _meta_run(op, leaves, types, hypothesis, size, size == batch)
        if found is None or (runs and len(found) != len(runs[0])):
            return None
        runs.append(found)
    device = _device_of(leaves)
    results: list[Result | None] = []
    for outs in zip(*runs, strict=True):
        first = outs[0]
        if not isinstance(first, Tensor):
            if any(isinstance(out, Tensor) for out in outs):
                return None
            results.append(None)
            continue
        if stays_plain(first):
            return None
        shape = _linear_shape([tuple(out.shape) for out in outs], batches)
        if shape is None:
            return None
        results.append(
            Result(TensorType(first.dtype, shape), tuple(first.shape), tuple(first.stride()), device)
        )
    return tuple(results)


def results_at(
    op: OpOverload,
    leaves: CallLeaves,
    types: Sequence[TensorType],
    hypothesis: Hypothesis,
    batch: int,
    results: Sequence[Result | None],
) -> tuple[Result | None, ...] | None:
    """Return proven results for a call of another batch size; None if a run on meta tensors has others."""
    found = _meta_run(op, leaves, types, hypothesis, batch, True)
    if found is None or len(found) != len(results):
        return None
    values, device = {B.name: batch}, _device_of(leaves)
    made: list[Result | None] = []
    for out, result in zip(found, results, strict=True):
        if result is None or not isinstance(out, Tensor):
            if result is not None or isinstance(out, Tensor):
                return None
            made.append(None)
            continue
        shape = tuple(evaluate(size, values) for size in result.type.shape)
        if tuple(out.shape) != shape or out.dtype != result.type.dtype:
            return None
        made.append(Result(result.type, shape, tuple(out.stride()), device))
    return tuple(made)


def _linear_shape(shapes: Sequence[tuple[int, ...]], batches: Sequence[int]) -> tuple[Dim, ...] | None:
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found: list[Dim] = []
    for sizes in zip(*shapes, strict=True):
        if len(set(sizes)) == 1:
            found.append(int(sizes[0]))
            continue
        factor, rest = divmod(sizes[1] - sizes[0], batches[1] - batches[0])
        constant = sizes[0] - factor * batches[0]
        if rest or any(n != factor * b + constant for n, b in zip(sizes, batches, strict=True)):
            return None
        size: Any = factor * B + constant
        found.append(size)
    return tuple(found)


def _meta_run(
    op: OpOverload,
    leaves: CallLeaves,
    types: Sequence[TensorType],
    hypothesis: Hypothesis,
    batch: int,
    actual: bool,
) -> list[Any] | None:
    """Return the results of the op on meta tensors of this batch size; None if it does not run."""
    values = {B.name: batch}
    sizes = {i: evaluate(size, values) for i, size in hypothesis.sizes}
    operands = []
    for tensor, type_ in zip(leaves.tensors, types, strict=True):
        shape = [evaluate(size, values) for size in type_.shape]
        if actual:
            operands.append(torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        else:
            operands.append(torch.empty(shape, dtype=tensor.dtype, device="meta"))
    args, kwargs = leaves.filled(operands, sizes, kind=list)
    args, kwargs = [_on_meta(value) for value in args], {name: _on_meta(v) for name, v in kwargs.items()}
    try:
        found = (op if actual else AS_RESHAPE.get(op, op))(*args, **kwargs)
    except Exception:  # whatever an op raises for sizes that do not fit: so the hypothesis is wrong
        return None
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _on_meta(value: Any) -> Any:
    return _META if isinstance(value, torch.device) else value


def _device_of(leaves: CallLeaves) -> torch.device:
    """Return the device of the results: one that the call names, or the operands'."""
    named = leaves.constant(torch.device)
    return named or max(leaves.tensors, key=lambda tensor: tensor.dim()).device
