"""Branches on flags of the batch: a program has one way, and a call that goes another is run by its program.

    if mask.any(): ...              program 1: the way of False;  its result says that mask.any() is True
                                    program 2: the way of True    runs the same call, from where that began

The flag is that of the global batch, so all ranks see the same and run the same programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import eq

import torch
from torch import Tensor, fx, nn

from fxdp.capture.captured import Captured, Check
from fxdp.compiler.program import Program
from fxdp.ir.draws import random_state, set_random_state
from fxdp.ir.metadata import meta
from fxdp.ir.signature import Buffer, Input, Mutation, Parameter
from fxdp.module.call import Call


@dataclass(frozen=True)
class OtherBranch:
    """A call goes another way than the program that ran it; it is as if it had not run."""

    known: tuple[bool, ...]
    """Its way at each branch up to the first at which it leaves the program's."""
    rest: tuple[bool, ...]
    """At those after it, a guess."""

    @property
    def branches(self) -> tuple[bool, ...]:
        """At all of them."""
        return self.known + self.rest

    def is_of(self, captured: Captured) -> bool:
        """Whether a program goes this way, as far as it is known."""
        return captured.branches[: len(self.known)] == self.known

    def guessed(self, captured: Captured) -> int:
        """At how many branches a program goes as this is guessed to."""
        return sum(map(eq, captured.branches, self.branches))


def on_its_branch(
    program: Program, module: nn.Module, call: Call, run: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor] | OtherBranch:
    """What `run` gives for a call, if that goes the way of the program."""
    if not program.captured.branches:
        return run()
    before = _Before(program.gm.graph, module, call.tensors)
    outputs = run()
    other = _other_branch(program.captured.checks, outputs)
    if other is None:
        return outputs
    before.put_back()
    return other


def _other_branch(checks: Sequence[Check], outputs: Sequence[Tensor]) -> OtherBranch | None:
    """The way of a call that left a program's at a branch, before anything raised."""
    known: list[bool] = []
    for i, check in enumerate(checks):
        found = bool(outputs[check.output])
        if check.branch:
            known.append(found)
        if found != check.passes:
            rest = (bool(outputs[later.output]) for later in checks[i + 1 :] if later.branch)
            return OtherBranch(tuple(known), tuple(rest)) if check.branch else None
    return None


class _Before:
    """What a program writes, and where random numbers stand, as they are before a call."""

    def __init__(self, graph: fx.Graph, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        specs = [spec.of for spec in meta(graph.output_node()).results if isinstance(spec, Mutation)]
        written: list[Tensor] = [module.get_buffer(spec.name) for spec in specs if isinstance(spec, Buffer)]
        written += [module.get_parameter(spec.name) for spec in specs if isinstance(spec, Parameter)]
        written += [inputs[spec.index] for spec in specs if isinstance(spec, Input)]
        self._written = [(tensor, tensor.detach().clone()) for tensor in written]
        self._random = random_state()

    def put_back(self) -> None:
        """Make all of it as it was."""
        with torch.no_grad():
            for tensor, values in self._written:
                tensor.copy_(values)
        set_random_state(self._random)
