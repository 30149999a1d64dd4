"""Random numbers: which calls draw them, and where the seed of what they draw comes from.

A program has no seed of its own: it reads the user's generator, which `torch.manual_seed` sets.

    rng="sharded"                                            rng="single-device"

    the user's generator                                     the user's generator,
      | drawn_seed: one draw per step                        in one state on all ranks
    seed of the step                                           |
      | rank_seed              | part_seed, in stages          | every rank draws the numbers of the
    generator of a rank      generator of a rank's stage       | global batch and keeps its part
      |                      in one micro-batch                | (`ops/full_batch_draws.py`)
    dropout                    |                             dropout
                             dropout

Why not the user's generator itself: seeded alike, as it should be, it would give all ranks one mask for their
different samples. Why one draw for the seed, and afterwards all as it was: the user's generator moves on by
the same on every rank, however much each has drawn for its part, so that a run is reproduced by one seed and
what ranks draw outside of the program stays in step. Why a seed for each micro-batch: schedules run these in
different orders, and a checkpoint runs one twice, which must draw the same again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.graphs import argument_of
from fxdp.torch_compat import OpOverload

_SEEDS = frozenset({"philox_seed", "rng_state"})
"""Names of operands from which attention's backwards take their seed."""


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call takes numbers from a generator (attention without dropout does not).

    Nor does attention's backward, which torch marks as if it did.
    """
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if _takes_seed(target):
        return False
    probability = argument_of(target, "dropout_p", args, kwargs)
    return probability is None or probability != 0.0


def draws_again(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call takes once more, from a seed it is given, the numbers that its forward drew.

    A fused attention does not keep its mask of dropout: its backward makes it anew, by the place of each
    element in the batch that the forward had.
    """
    if not isinstance(target, OpOverload) or not _takes_seed(target):
        return False
    return bool(argument_of(target, "dropout_p", args, kwargs))


def _takes_seed(target: OpOverload) -> bool:
    return not _SEEDS.isdisjoint(argument.name for argument in target._schema.arguments)


def node_draws(node: fx.Node) -> bool:
    """The same for a node; a result picked from a drawing call counts as drawn."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and node_draws(source)
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)


def graph_draws(graph: fx.Graph) -> bool:
    """Whether any node of a graph draws random numbers."""
    return any(map(node_draws, graph.nodes))


RandomState: TypeAlias = "tuple[Tensor, tuple[Tensor, ...]]"
"""The states of the CPU's generator and of all CUDA devices', if CUDA is in use."""

_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 / phi: consecutive ranks land far apart
_MICROBATCH = 0xBF58476D1CE4E5B9  # an odd number unlike that of ranks: their sums do not meet


def drawn_seed() -> int:
    """A seed from the user's generator, which moves on by one draw."""
    return int(torch.randint(0, 2**62, ()).item())


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank's own generator, different on every rank; below 2**63."""
    return (seed + _GOLDEN_RATIO * (rank + 1)) % 2**63


def part_seed(seed: int, part: int, microbatch: int) -> int:
    """The seed for one micro-batch of a part of a program; `part` counts the parts of all ranks."""
    return rank_seed(seed + microbatch * _MICROBATCH, part)


def random_state() -> RandomState:
    """Where the user's generators stand."""
    # who asks CUDA for a state starts it up, hundreds of MB, also in a program that runs on the CPU
    return torch.get_rng_state(), tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else ()


def set_random_state(state: RandomState) -> None:
    """Put the user's generators where they were."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


class kept_random_state:  # noqa: N801 - reads as a statement
    """After the block the user's generators are where they were before it."""

    def __enter__(self) -> None:
        self._before = random_state()

    def __exit__(self, *_: object) -> None:
        set_random_state(self._before)


class own_generator(kept_random_state):  # noqa: N801
    """Draw from a generator of this seed in a block; afterwards the user's generators are where they were."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        super().__enter__()
        reseed(self._seed)


def reseed(seed: int) -> None:
    """Set the seed of the generators that are in use."""
    # not torch.manual_seed: where CUDA is not in use it would note the seed and the entire stack for later
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
