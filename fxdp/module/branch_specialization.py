"""Branches on flags of the batch: a program is specialized to one branch, a second program to the opposite.

    if mask.any(): ...      program 1: branch False; a result of the program says that mask.any() is True
                            program 2: branch True   runs the same call again from the initial state

The flag is computed for the global batch, so all ranks see the same flag and run the same programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq

import torch
from torch import Tensor, fx, nn

from fxdp.capture.captured import Captured, Check
from fxdp.ir.graph.draws import random_state, set_random_state
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Buffer, Input, Mutation, Parameter


@dataclass(frozen=True)
class OtherBranch:
    """The branches of a call that leaves the branches of the program; the call is undone."""

    known: tuple[bool, ...]
    """The answers at the branches up to and including the first difference from the program."""
    rest: tuple[bool, ...]
    """Guessed answers at later branches."""

    @property
    def branches(self) -> tuple[bool, ...]:
        """The answers at all branches."""
        return self.known + self.rest

    def is_of(self, captured: Captured) -> bool:
        """Return whether a program takes these branches, as far as the answers are known."""
        return captured.branches[: len(self.known)] == self.known

    def guessed(self, captured: Captured) -> int:
        """Return the number of branches at which a program agrees with the answers."""
        return sum(map(eq, captured.branches, self.branches))


def other_branch(checks: Sequence[Check], outputs: Sequence[Tensor]) -> OtherBranch | None:
    """Return the branches of a call that left the program's branches before a check raised; else None."""
    known: list[bool] = []
    for i, check in enumerate(checks):
        found = bool(outputs[check.output])
        if check.branch:
            known.append(found)
        if found != check.passes:
            rest = (bool(outputs[later.output]) for later in checks[i + 1 :] if later.branch)
            return OtherBranch(tuple(known), tuple(rest)) if check.branch else None
    return None


class StateBefore:
    """A copy of the random state and of all tensors that a program writes, from before a call."""

    def __init__(self, graph: fx.Graph, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        specs = [spec.of for spec in meta(graph.output_node()).results if isinstance(spec, Mutation)]
        written: list[Tensor] = [module.get_buffer(spec.name) for spec in specs if isinstance(spec, Buffer)]
        written += [module.get_parameter(spec.name) for spec in specs if isinstance(spec, Parameter)]
        written += [inputs[spec.index] for spec in specs if isinstance(spec, Input)]
        self._written = [(tensor, tensor.detach().clone()) for tensor in written]
        self._random = random_state()

    def put_back(self) -> None:
        """Restore the tensors and the random state."""
        with torch.no_grad():
            for tensor, values in self._written:
                tensor.copy_(values)
        set_random_state(self._random)
