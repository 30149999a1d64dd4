"""Run a decomposition of an op: local steps, with redistributions between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.plans.op_plan import numbers
from fxdp.eager.redistribute import redistributed
from fxdp.ir.types.decompositions import Decomposition, Term
from fxdp.ir.types.placements import Placement, R


def decomposed(
    steps: Decomposition, wants: Sequence[Placement], locals_: Sequence[Tensor], axis: BatchAxis, name: str
) -> list[Tensor | None]:
    """Return the results of a decomposition, each intermediate value redistributed where a step reads it."""
    made: dict[tuple[int, Placement], Tensor] = {}
    born: dict[int, Placement] = dict(enumerate(wants))
    made.update({(i, want): local for i, (want, local) in enumerate(zip(wants, locals_, strict=True))})

    def read(term: Term) -> Tensor:
        key = term.index, term.at
        if key not in made:
            have = born[term.index]
            made[key] = redistributed(made[term.index, have], term.type, have, term.at, axis, name)
        return made[key]

    def value(argument: Any) -> Any:
        return read(argument) if isinstance(argument, Term) else numbers(argument, axis.values)

    for index, step in enumerate(steps.steps, 1):
        result = step.target(*map(value, step.args), **{key: value(v) for key, v in step.kwargs})
        made[-index, step.at], born[-index] = result, step.at
    found: list[Tensor | None] = []
    for term in steps.results:
        if term is None:
            found.append(None)
        elif (reduced := made.get((term.index, R))) is not None:
            found.append(reduced)
        else:
            found.append(made[term.index, born[term.index]])
    return found
