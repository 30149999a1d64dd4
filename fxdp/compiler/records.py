"""Records of a compilation on torch's channels: the log `fxdp`, and the structured trace.

TORCH_LOGS="fxdp"     summary of capture and compilation
TORCH_LOGS="+fxdp"    also the seconds of passes, the program, all communication by line, the schedule
TORCH_TRACE=folder    four artifacts that `tlparse folder` shows beside Inductor's artifacts:
                      fxdp_joint_graph, fxdp_placements, fxdp_communication, fxdp_schedule
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from torch import fx

from fxdp.compiler.planning import Planning
from fxdp.compiler.program import Program
from fxdp.ir.graph.graph_text import graph_text
from fxdp.reports.plan_data.plan_json import plain
from fxdp.torch_compat import trace_artifact, tracing

_log = logging.getLogger("fxdp")


def log_captured(gm: fx.GraphModule) -> None:
    """Log the joint graph, unchanged by passes."""
    _log.info("captured a joint graph of %d nodes", len(gm.graph.nodes))
    if tracing():
        trace_artifact("fxdp_joint_graph", lambda: graph_text(gm, {}))


def log_program(program: Program, sizes: Mapping[str, int]) -> None:
    """Log the compiled program at the sizes of the call; builds no plan if neither log nor trace is on."""
    detailed, traced = _log.isEnabledFor(logging.DEBUG), tracing()
    if not detailed and not traced:
        return
    plan = Planning(program, sizes).plan()
    if detailed:
        _log.debug("%s", "\n".join(f"{name} took {seconds:.3f} s" for name, seconds in plan.timings.items()))
        _log.debug("the program of each rank\n%s", plan.text)
        _log.debug("%s", plan)
    if traced:
        trace_artifact("fxdp_placements", lambda: graph_text(program.causes, program.mesh.shape))
        rows = plain(plan.collectives())
        trace_artifact("fxdp_communication", lambda: json.dumps(rows, indent=1), "json")
        if plan.schedule is not None:
            trace_artifact("fxdp_schedule", plan.timetable)
