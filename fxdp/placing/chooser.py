"""Choice among a rule's alternatives: the one with the fewest bytes to redistribute the operands.

Costs count bytes that a rank sends, up to a common factor: P -> R is an all-reduce (2n), P -> S a
reduce-scatter (n), S -> R an all-gather (n); R -> S slices and R -> P keeps the value on one rank, both
free of traffic. A value that is cheaply computed from a smaller one (a cast, an expansion) is gathered there.
A gather that only keeps a sum of terms unreduced saves nothing: the price of the sum is added. Ties go to the
alternative that leaves less work and memory on each rank: sharded results first (on the first dim, like the
program's results), then replicated, then partial ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fxdp.ir.routes import price
from fxdp.ir.types.placements import Partial, Placement, R, Replicate, Shard
from fxdp.ir.types.sizes import batch_factor
from fxdp.ir.types.value_types import TensorType, type_bytes
from fxdp.rules.registry import Alternative, Op, Operand


def redistribution_cost(
    have: Sequence[Placement], want: Placement | None, n: int, gather_bytes: int | None = None
) -> float:
    """Return the bytes sent to bring a value of `n` bytes from the existing placements to the wanted one."""
    if want is None or want in have:
        return 0.0
    gathered = n if gather_bytes is None else gather_bytes
    return min(price(p, want, n, gathered) for p in have)


def choose(op: Op, alternatives: Iterable[Alternative]) -> tuple[Alternative, float]:
    """Return the cheapest alternative and the redistribution bytes; "all R" is always a candidate."""
    return cheapest(op, [op.alternative(), *alternatives])


def cheapest(op: Op, candidates: Sequence[Alternative]) -> tuple[Alternative, float]:
    """Return the cheapest candidate and the redistribution bytes."""
    found = list(priced(op, candidates))
    _, _, index = min((total, rank, i) for i, (_, _, total, rank) in enumerate(found))
    return found[index][0], found[index][1]


def priced(
    op: Op, candidates: Iterable[Alternative]
) -> Iterator[tuple[Alternative, float, float, tuple[int, int]]]:
    """Yield each candidate with its bytes, the bytes with what it postpones, and its rank among equals."""
    sizes = [type_bytes(o.type) for o in op.operands]
    for alternative in candidates:
        cost = _cost(alternative, op.operands, sizes)
        yield alternative, cost, cost + _postponed(op, alternative, cost), _rank(alternative)


def _cost(alternative: Alternative, operands: Sequence[Operand], sizes: Sequence[int]) -> float:
    inside = alternative.decomposition.bytes if alternative.decomposition else 0
    return inside + sum(
        redistribution_cost(o.placements, p, n, o.gather_bytes)
        for o, p, n in zip(operands, alternative.inputs, sizes, strict=True)
    )


def _postponed(op: Op, alternative: Alternative, cost: float) -> float:
    """Return the bytes of the reduction that an alternative with traffic leaves for later."""
    # slicing and masking have a small cost, but send nothing
    if cost < 1:
        return 0.0
    pairs = zip(op.outputs, alternative.outputs, strict=True)
    return float(sum(_reduction(t) for t, p in pairs if t is not None and isinstance(p, Partial)))


def _reduction(type_: TensorType) -> int:
    # reduced into shards if it has a batch dim; in full it costs twice as much
    scatters = any(batch_factor(n) is not None for n in type_.shape)
    return type_bytes(type_) * (1 if scatters else 2)


def _rank(alternative: Alternative) -> tuple[int, int]:
    first = next((p for p in alternative.outputs if p is not None), R)
    if isinstance(first, Shard):
        return 0, first.dim
    return 1 if isinstance(first, Replicate) else 2, 0
