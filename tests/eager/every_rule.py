"""Each op with a rule, by the eager driver on virtual ranks, with batches of the size of other dims.

An eager call has numbers where a graph has sizes in `B`: of `[4, 4]` nobody says which 4 counts samples, or
that any does. So an op's random arguments (those that its rule is proven on) are made for a batch size that
other sizes have, too; each operand gets any placement that its numbers allow, also along dims that the
rule's author never thought of as the batch; and what comes out must be what one device computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.eager.dispatch import run_op
from fxdp.eager.tensor import GlobalTensor
from fxdp.ir.types.placements import P, Placement, R, Shard
from fxdp.rules.proof import samples
from fxdp.rules.proof.samples import Sample
from fxdp.rules.registry import registry
from fxdp.torch_compat import OpOverload
from tests.eager.virtual import VirtualRanks, on_virtual_ranks, part_of
from tests.rules.samples import STAND_INS, all_samples
from tests.rules.samples.draw import Draw

SPLITS = {1: (0, 1), 2: (1, 0, 1), 3: (2, 0, 1), 4: (3, 0, 1), 6: (1, 5)}
"""How a batch of each size lies on the ranks: of the sizes that samples' other dims have."""
TOLERANCE = 1e-9


def name_of(op: OpOverload) -> str:
    """An op as samples are listed."""
    return str(op).removeprefix("aten.").removesuffix(".default")


_MAKERS = all_samples()
_NO_VALUE = {"empty_like", "new_empty", "new_empty_strided"}
_NOT_READ: dict[str, tuple[int, ...]] = {
    "_embedding_bag": (3,), "_embedding_bag_forward_only": (3,), "native_batch_norm": (1, 2),
    "_batch_norm_no_update": (1, 2), "_native_batch_norm_legit_functional": (1, 2),
    "_native_batch_norm_legit_no_training": (1, 2),
}  # fmt: skip
"""Results without a meaning in some modes, to which torch's meta kernels give other shapes than the CPU's."""
_OTHER_STRIDES = {"_linalg_svd", "linalg_eig", "nonzero", "nonzero_static"}
"""Results whose strides are others in torch's meta kernels than on the CPU."""


_READS_BITS = {"view.dtype", "view_copy.dtype", "multilabel_margin_loss_backward"}
"""Ops to which the rounding of a sum is another value."""


def _is_checked(op: OpOverload) -> bool:
    # statistics that are each rank's own by meaning, as `full=False` says, are no one device's
    same = registry[op].full and not op._schema.is_mutable
    return same and name_of(op) in _MAKERS.keys() - STAND_INS.keys() - _NO_VALUE


TARGETS = {name_of(op): op for op in registry.targets() if _is_checked(op)}
"""Ops whose kernels run here, as samples list them."""


@dataclass(frozen=True)
class Wrong:
    """A call whose result differs from one device's; `again` is what to call to see it."""

    op: str
    seed: int
    placements: tuple[str, ...]
    words: str

    def __str__(self) -> str:
        return f"check({self.op!r}, {self.seed}): ({', '.join(self.placements)}): {self.words}"


def check(name: str, seed: int) -> Wrong | None:
    """Run one random call of an op; None if it is one device's, or if one device refuses it."""
    op = TARGETS[name]
    choose = Random(f"{name} {seed}")
    batch = choose.choice(list(SPLITS))
    drawn = _MAKERS[name](Draw(seed))
    given = pytree.tree_map(samples.expression, samples.as_tuples((drawn.args, dict(drawn.kwargs))))
    leaves, structure = pytree.tree_flatten(given)
    generator = torch.Generator().manual_seed(seed)
    values = [leaf.make(batch, generator) if isinstance(leaf, Sample) else leaf for leaf in leaves]
    values = [v if isinstance(v, Tensor) else samples.concrete(v, batch) for v in values]
    expected = _called(op, values, structure)
    if expected is None or not any(isinstance(v, Tensor) for v in values):
        return None
    placements = [_placement(v, batch, choose, name in _READS_BITS) for v in values if isinstance(v, Tensor)]
    spelled = tuple(map(str, placements))
    try:
        found = on_virtual_ranks(
            len(SPLITS[batch]), lambda ranks: _on_rank(op, values, structure, placements, ranks, batch)
        )
    except Exception as error:
        return Wrong(name, seed, spelled, f"{type(error).__name__}: {error}")
    for rank, results in enumerate(found):
        words = _difference(name, results, expected)
        if words:
            return Wrong(name, seed, spelled, f"batch {batch}, rank {rank}: {words}")
    return None


def _filled(values: Sequence[Any], structure: Any) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = pytree.tree_unflatten(values, structure)
    return [_listed(value) for value in args], {key: _listed(value) for key, value in kwargs.items()}


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def _called(op: OpOverload, values: Sequence[Any], structure: Any) -> list[Any] | None:
    copies = [v.clone() if isinstance(v, Tensor) else v for v in values]
    args, kwargs = _filled(copies, structure)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _flat(op(*args, **kwargs))
        except Exception:  # the sample does not run at this batch size
            return None


def _placement(value: Tensor, batch: int, choose: Random, bits: bool) -> Placement | None:
    """A placement that a user's value may have, or None: a plain tensor; no sum for ops that read bits."""
    found: list[Placement | None] = [None, R]
    if value.dtype in (torch.float64, torch.int64, torch.complex128) and not bits:
        found.append(P)
    for dim, size in enumerate(value.shape):
        if size and size % batch == 0:
            found += [Shard(dim), Shard(dim)]  # most values that meet a rule are sharded
            found += [
                Shard(dim, outer) for outer in range(2, size // batch + 1) if size // batch % outer == 0
            ]
    return choose.choice(found)


def _on_rank(
    op: OpOverload, values: Sequence[Any], structure: Any, placements: Sequence[Placement | None],
    ranks: VirtualRanks, batch: int,
) -> list[Any]:  # fmt: skip
    axis, rest = ranks.axis(SPLITS[batch]), iter(placements)
    given = []
    for value in values:
        if isinstance(value, Tensor):
            placement = next(rest)
            value = value.clone() if placement is None else part_of(value, axis, placement)
        given.append(value)
    if not any(isinstance(value, GlobalTensor) for value in given):
        given = [part_of(v, axis, R) if isinstance(v, Tensor) else v for v in given]
    args, kwargs = _filled(given, structure)
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        results = _flat(run_op(GlobalTensor, op, (), args, kwargs))
        return [_full(one) for one in results]


def _full(value: Any) -> Any:
    if not isinstance(value, GlobalTensor):
        return value
    return value.shape, value.stride(), value.full()


def _flat(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _difference(name: str, results: Sequence[Any], expected: Sequence[Any]) -> str:
    if len(results) != len(expected):
        return f"{len(results)} results, {len(expected)} on one device"
    for i, (got, want) in enumerate(zip(results, expected, strict=True)):
        if i not in _NOT_READ.get(name, ()) and (words := _unlike(name, got, want)):
            return f"result {i}: {words}"
    return ""


def _unlike(name: str, got: Any, want: Any) -> str:
    if not isinstance(want, Tensor):
        return "" if got == want else f"{got}, {want} on one device"
    shape, stride, full = got if isinstance(got, tuple) else (got.shape, got.stride(), got)
    if not shape == full.shape == want.shape or full.dtype != want.dtype:
        return f"{full.dtype}{list(full.shape)}, {want.dtype}{list(want.shape)} on one device"
    if not torch.allclose(full, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return f"{full.flatten()[:4].tolist()}..., {want.flatten()[:4].tolist()}... on one device"
    if stride != want.stride() and want.numel() > 1 and name not in _OTHER_STRIDES:
        return f"strides {stride}, {want.stride()} on one device"
    return ""


def every(draws_each: int, first: int = 0) -> Iterator[Wrong]:
    """All wrong calls among so many of each op."""
    for name in TARGETS:
        for seed in range(first, first + draws_each):
            wrong = check(name, seed)
            if wrong is not None:
                yield wrong
