"""Programs of many schedules, stages and micro-batches, captured once; nothing runs."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxdp.capture.captured import Captured
from fxdp.compiler.prepare import prepare
from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options
from fxdp.pipeline.schedule.catalogue import _SCHEDULES
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from tests.capturing import capture
from tests.pipeline.models import Skips, skips

BATCH = 8

Case = tuple[int, int, dict[str, Any]]
"""Pipeline ranks, data ranks, options."""


def _recomputing(mode: str) -> dict[str, Any]:
    return {"activation_checkpointing": mode}


CASES: tuple[Case, ...] = (
    (1, 2, {"pipeline": {"microbatches": 2}}),
    (2, 1, {"pipeline": {"microbatches": 1}}),
    (2, 2, {"pipeline": {"microbatches": 4, "schedule": "gpipe"}}),
    (2, 2, {"pipeline": {"microbatches": 8}}),
    (2, 2, {"pipeline": {"microbatches": 4, "gradients": "owner"}}),
    (2, 2, {"pipeline": {"microbatches": 3, "schedule": "interleaved", "stages": 4}}),
    (2, 1, {"pipeline": {"microbatches": 4, "schedule": "zero-bubble"}, **_recomputing("always")}),
    (3, 2, {"pipeline": {"microbatches": 5, "schedule": "zero-bubble"}}),
    (3, 1, {"pipeline": {"microbatches": 4, "schedule": "interleaved", "stages": 6, "gradients": "owner"}}),
    (4, 2, {"pipeline": {"microbatches": 8, "schedule": "gpipe"}, **_recomputing("except_last")}),
    (4, 1, {"pipeline": {"microbatches": 8, "stages": ["b", "c", "d"]}}),
)


def random_cases(count: int) -> Iterator[Case]:
    """Any schedule, more stages than ranks, micro-batches that may be empty; the same in every process."""
    rng = random.Random(0)
    for _ in range(count):
        schedule, ranks = rng.choice(sorted(_SCHEDULES)), rng.choice((1, 2, 3, 4))
        stages = ranks * rng.choice((2, 3)) if schedule == "interleaved" else rng.choice((ranks, ranks + 1))
        options = {
            "pipeline": {
                "schedule": schedule,
                "stages": stages,
                "microbatches": rng.choice((2, 3, 5, 9)),
                "gradients": rng.choice(("everywhere", "owner")),
            },
            "activation_checkpointing": rng.choice(("never", "always")),
        }
        yield ranks, rng.choice((1, 2)), options


@functools.cache
def _captured(trains: bool) -> Captured:
    with torch.set_grad_enabled(trains):
        return capture(Skips(), (), skips(BATCH), couple=True)


def graphs(
    ranks: int, data_ranks: int, options: dict[str, Any], *, trains: bool = True
) -> Iterator[fx.Graph]:
    """The program of each pipeline rank for a model with skips over stages."""
    found = _captured(trains)
    mesh = mesh_of({"pp": ranks, "dp": data_ranks}, "cpu")
    local = prepare(replace(found, gm=copy_graph(found.gm)), mesh, Options(**options), 64)
    sizes = {"B": BATCH * data_ranks, "b": BATCH, "offset": 0, "b_max": BATCH}
    layout = MicrobatchSizes.of(sizes, options["pipeline"]["microbatches"])
    for rank in range(ranks):
        yield local.writer(layout, rank).write()
