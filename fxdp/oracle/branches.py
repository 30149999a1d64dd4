"""Find the data-dependent branches that a model's code takes on one device."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.inputs import read_inputs, run_model
from fxdp.capture.refusals.stateful import aside, copy_of
from fxdp.capture.taken_branches import taken_branches
from fxdp.ir.graph.draws import reseed
from fxdp.ir.graph.metadata import Location
from fxdp.options import Options
from fxdp.oracle.one_device import first_samples


def branches_at(
    found: Captured, module: nn.Module, inputs: Any, options: Options, batch: int, seed: int
) -> tuple[bool, ...]:
    """Return the answer at each branch of a capture for the first samples, up to the first different answer.

    `seed` must be the seed of the run to be compared, because dropout may affect the answers.
    """
    if not found.branches:
        return ()
    args, kwargs = inputs
    given = read_inputs(module, args, kwargs, options.batch_dims)
    dims = found.batch if not found.axes.names else (None,) * len(found.batch)  # all of a ragged batch
    args, kwargs = given.rebuild(first_samples(given.tensors, dims, batch))

    def run() -> None:
        reseed(seed)
        run_model(copy_of(module), args, kwargs, options.loss_fn, options.precision)

    with aside():
        asked = taken_branches(run)
    return _at_branches(found, asked)


def _at_branches(found: Captured, asked: list[tuple[Location, bool]]) -> tuple[bool, ...]:
    left: dict[Location, deque[bool]] = {}
    for location, value in asked:
        left.setdefault(location, deque()).append(value)
    branches: list[bool] = []
    for check in found.checks:
        if check.branch:
            effects = left.get(check.location)
            branches.append(effects.popleft() if effects else check.passes)
            if branches[-1] != check.passes:
                break
    return tuple(branches)


def on_branch(found: Captured, branches: tuple[bool, ...]) -> bool:
    """Return whether a capture took these branches."""
    return found.branches[: len(branches)] == branches
