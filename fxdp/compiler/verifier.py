"""Which invariants hold at each level, and the report of all that are broken.

A fault is a bug in a pass or in a registered rule, never the user's. Each line shows the node as the
golden text prints it.
"""

from __future__ import annotations

from torch import fx

from fxdp.compiler.invariants import (
    Check,
    collectives_have_causes,
    collectives_have_one_wait,
    conversions_say_what_they_do,
    edges_need_no_conversion,
    everything_is_executable,
    inputs_have_slots,
    no_skip_marks_are_left,
    outputs_are_in_order,
    partial_flows_through_linear_ops,
    recipes_are_expanded,
    results_are_not_partial,
    results_have_slots,
    shards_fit_shapes,
    sizes_are_own,
    tensors_are_placed,
    tensors_have_types,
)
from fxdp.errors import VerifierError
from fxdp.ir.graph_text import node_text
from fxdp.ir.level import Level
from fxdp.pipeline.cut.stage_checks import STAGE_CHECKS

CHECKS: dict[Level, tuple[Check, ...]] = {
    Level.CAPTURED: (
        inputs_have_slots,
        results_have_slots,
        tensors_have_types,
        outputs_are_in_order,
        no_skip_marks_are_left,
    ),
    Level.PLACED: (tensors_are_placed, shards_fit_shapes),
    Level.EXPLICIT: (
        edges_need_no_conversion,
        conversions_say_what_they_do,
        collectives_have_one_wait,
        collectives_have_causes,
        partial_flows_through_linear_ops,
        results_are_not_partial,
        recipes_are_expanded,
    ),
    Level.LOCAL: (sizes_are_own,),
    Level.STAGED: STAGE_CHECKS,
    Level.EMITTED: (everything_is_executable,),
}
"""The checks that each level adds to those before it."""

_UNTIL: dict[Check, Level] = {
    edges_need_no_conversion: Level.LOCAL,
    conversions_say_what_they_do: Level.LOCAL,
    collectives_have_one_wait: Level.LOCAL,
    collectives_have_causes: Level.LOCAL,
    partial_flows_through_linear_ops: Level.LOCAL,
    tensors_are_placed: Level.LOCAL,
    **dict.fromkeys(STAGE_CHECKS, Level.STAGED),
}
"""Checks on annotations that emission, which lowers several functions to one, no longer keeps."""


def verify(gm: fx.GraphModule, level: Level, after: str) -> None:
    """Check all invariants up to `level`.

    Raises
    ------
    VerifierError : listing every fault with its line; `after` names the pass to blame.
    """
    gm.graph.lint()
    faults: list[str] = []
    for step, checks in CHECKS.items():
        for check in checks:
            if step <= level <= _UNTIL.get(check, level):
                faults += [f"{node_text(node, ('dp',))}\n    {what}" for node, what in check(gm.graph)]
    if faults:
        places = "1 place" if len(faults) == 1 else f"{len(faults)} places"
        listing = "\n  ".join(faults)
        raise VerifierError(f"after {after}, the graph breaks level {level.name} in {places}:\n  {listing}")
