"""Random numbers: the calls that draw, and the seeds from which they draw.

A program has no separate seed, but reads the user's generator, which `torch.manual_seed` sets.

    rng="sharded"                                            rng="single-device"

    the user's generator                                     the user's generator,
      | drawn_seed: one draw per step                        in one state on all ranks
    seed of the step                                           |
      | rank_seed              | part_seed, in stages          | every rank draws the numbers of the
    generator of a rank      generator of a rank's stage       | global batch and keeps its part
      |                      in one micro-batch                | (`ops/full_batch_draws.py`)
    dropout                    |                             dropout
                             dropout

The user's generator is not used directly: it should be seeded equally on all ranks, so all ranks would get
one mask for different samples. It yields one draw for the seed, and the later state is restored after each
program: so the generator advances equally on every rank, however many numbers a rank has drawn. One seed then
reproduces a run, and draws outside of the program stay in step. Each micro-batch has a seed, because
schedules run micro-batches in different orders, and a checkpoint runs one twice, which must repeat the draws.
With `fxdp.Bitwise` each random op of a block has a seed (`draw_apart`), so no cut into stages moves a draw.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.graph.graphs import argument_of
from fxdp.ir.graph.metadata import meta
from fxdp.torch_compat import OpOverload

_SEEDS = frozenset({"philox_seed", "rng_state"})
"""Names of the operands from which backwards of attention take their seed."""


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the call takes numbers from a generator (attention without dropout does not).

    Neither do backwards of attention, although torch tags these as random.
    """
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if _takes_seed(target):
        return False
    probability = argument_of(target, "dropout_p", args, kwargs)
    return probability is None or probability != 0.0


def draws_again(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the call regenerates, from a given seed, the numbers that the forward drew.

    A fused attention does not save the dropout mask: the backward regenerates the mask from the position of
    each element in the batch that the forward had.
    """
    if not isinstance(target, OpOverload) or not _takes_seed(target):
        return False
    return bool(argument_of(target, "dropout_p", args, kwargs))


def _takes_seed(target: OpOverload) -> bool:
    return not _SEEDS.isdisjoint(argument.name for argument in target._schema.arguments)


def node_draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers; a result picked from a drawing call counts as drawn."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and node_draws(source)
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)


def graph_draws(graph: fx.Graph) -> bool:
    """Return whether any node of a graph draws random numbers."""
    return any(map(node_draws, graph.nodes))


RandomState: TypeAlias = "tuple[Tensor, tuple[Tensor, ...]]"
"""The states of the CPU's generator and of all CUDA devices', if CUDA is in use."""

_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 / phi: consecutive ranks get distant seeds
_MICROBATCH = 0xBF58476D1CE4E5B9  # odd, and unrelated to the ranks' constant: sums of both do not collide


def drawn_seed() -> int:
    """Draw a seed from the user's generator, which advances by one draw."""
    return int(torch.randint(0, 2**62, ()).item())


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's own generator, different on every rank; below 2**63."""
    return (seed + _GOLDEN_RATIO * (rank + 1)) % 2**63


def part_seed(seed: int, part: int, microbatch: int) -> int:
    """Return the seed for one micro-batch of a part of a program; `part` counts the parts of all ranks."""
    return rank_seed(seed + microbatch * _MICROBATCH, part)


def number_draws(graph: fx.Graph) -> None:
    """Number the random ops of a program in its order, by which `draw_apart` seeds each of them."""
    drawing = (n for n in graph.nodes if n.op == "call_function" and draws(n.target, n.args, n.kwargs))
    for number, node in enumerate(drawing):
        meta(node).draw = number


def draw_apart(target: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    """Call a random op with a seed by its number and the last `reseed`, to which the generators return."""
    seed = torch.default_generator.initial_seed()
    with own_generator(rank_seed(seed, number)):
        return target(*args, **kwargs)


def random_state() -> RandomState:
    """Return the state of the user's generators."""
    # asking CUDA for a state would initialize it, hundreds of MB, even in a program that runs on the CPU
    return torch.get_rng_state(), tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else ()


def set_random_state(state: RandomState) -> None:
    """Restore the state of the user's generators."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


class kept_random_state:  # noqa: N801 - reads as a statement
    """Restore the state of the user's generators at the end of a block."""

    def __enter__(self) -> None:
        self._before = random_state()

    def __exit__(self, *_: object) -> None:
        set_random_state(self._before)


class own_generator(kept_random_state):  # noqa: N801
    """Seed the generators for a block; afterwards restore the state of the user's generators."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        super().__enter__()
        reseed(self._seed)


def reseed(seed: int) -> None:
    """Set the seed of the generators that are in use."""
    # not torch.manual_seed: without CUDA in use, it would record the seed and the entire stack for later
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
