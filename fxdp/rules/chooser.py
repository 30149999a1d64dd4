"""Choose among a rule's alternatives: the one whose operands cost the fewest bytes to bring in place.

Costs count bytes that a rank sends, to a factor common to all: P -> R is an all-reduce (2n), P -> S a
reduce-scatter (n), S -> R an all-gather (n); R -> S slices and R -> P keeps the value on one rank, both
free of traffic. Ties go to the alternative that leaves less work and memory on each rank: sharded
results first, then replicated, then partial ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxdp.annotations import TensorType
from fxdp.placements import Partial, Placement, R, Replicate, Shard
from fxdp.rules.registry import Alternative, Op, Operand
from fxdp.symbols import hint, product

_LOCAL_STEP = 1e-3  # slicing or masking moves no byte, but is not nothing


def size_bytes(type_: TensorType) -> int:
    """Bytes of the global value at the hinted sizes."""
    return hint(product(*type_.shape)) * type_.dtype.itemsize


def conversion_cost(have: Sequence[Placement], want: Placement | None, n: int) -> float:
    """Bytes sent to bring a value of `n` bytes from its placements to the wanted one."""
    if want is None or want in have:
        return 0.0
    return min(_one_conversion(p, want, n) for p in have)


def _one_conversion(have: Placement, want: Placement, n: int) -> float:
    if isinstance(have, Replicate):
        return _LOCAL_STEP
    if isinstance(have, Partial):
        return 2.0 * n if isinstance(want, Replicate) else n + _LOCAL_STEP
    return n + (0.0 if isinstance(want, Replicate) else _LOCAL_STEP)


def replicated(op: Op) -> Alternative:
    """Every operand whole, every result whole: exact for any deterministic op."""
    return op.alternative()


def choose(op: Op, alternatives: Iterable[Alternative]) -> tuple[Alternative, float]:
    """The cheapest alternative with its conversion bytes; "all R" is always among them."""
    sizes = [size_bytes(o.type) for o in op.operands]
    candidates = [replicated(op), *alternatives]
    priced = [(_cost(a, op.operands, sizes), _rank(a), i) for i, a in enumerate(candidates)]
    cost, _, index = min(priced)
    return candidates[index], cost


def _cost(alternative: Alternative, operands: Sequence[Operand], sizes: Sequence[int]) -> float:
    return sum(
        conversion_cost(o.placements, p, n)
        for o, p, n in zip(operands, alternative.inputs, sizes, strict=True)
    )


def _rank(alternative: Alternative) -> int:
    first = next((p for p in alternative.outputs if p is not None), R)
    return 0 if isinstance(first, Shard) else 1 if isinstance(first, Replicate) else 2
