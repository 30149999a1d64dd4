"""Which calls draw random numbers, and from which generator they do.

Seeded ops draw, unless their arguments turn the drawing off.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.graphs import argument_of
from fxdp.torch_compat import OpOverload


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call takes numbers from a generator (attention without dropout does not)."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    probability = argument_of(target, "dropout_p", args, kwargs)
    return probability is None or probability != 0.0


def node_draws(node: fx.Node) -> bool:
    """The same for a node; a result picked from a drawing call counts as drawn."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and node_draws(source)
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)


RandomState: TypeAlias = "tuple[Tensor, Tensor | None]"
"""The states of the CPU's and, where there is one, the current CUDA device's generator."""


def random_state() -> RandomState:
    """Where the user's generators stand."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_random_state(state: RandomState) -> None:
    """Put the user's generators where they were."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def drawn_seed() -> int:
    """A seed from the user's generator, which moves on by one draw."""
    return int(torch.randint(0, 2**62, ()).item())


class own_generator:  # noqa: N801 - reads as a statement
    """Draw from a generator of this seed in a block; afterwards the user's generators are where they were."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = random_state()
        torch.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        set_random_state(self._before)
