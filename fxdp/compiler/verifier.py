"""Report all invariants that a graph breaks.

A fault is a bug in a pass or in a registered rule, never in the user's code. Each line shows the node in
golden text.
"""

from __future__ import annotations

from torch import fx

from fxdp.compiler.invariants import CHECKS, UNTIL
from fxdp.errors import VerifierError
from fxdp.ir.graph.graph_text import node_text
from fxdp.ir.graph.level import Level


def verify(gm: fx.GraphModule, level: Level, after: str) -> None:
    """Check all invariants up to `level`.

    Raises
    ------
    VerifierError : lists every fault with its line; `after` names the pass that ran last.
    """
    gm.graph.lint()
    faults: list[str] = []
    for step, checks in CHECKS.items():
        for check in checks:
            if step <= level <= UNTIL.get(check, level):
                faults += [f"{node_text(node, ('dp',))}\n    {what}" for node, what in check(gm.graph)]
    if faults:
        places = "1 place" if len(faults) == 1 else f"{len(faults)} places"
        listing = "\n  ".join(faults)
        raise VerifierError(f"after {after}, the graph breaks level {level.name} in {places}:\n  {listing}")
