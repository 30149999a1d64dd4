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
from fxdp.ir.graphs import copy_graph
from fxdp.ir.mesh import mesh_of
from fxdp.options import Options
from fxdp.pipeline.schedule.catalogue import SCHEDULES
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from tests.capturing import capture
from tests.pipeline.models import Skips, skips

BATCH = 8

Case = tuple[int, int, dict[str, Any]]
"""Pipeline ranks, data ranks, options."""

CASES: tuple[Case, ...] = (
    (1, 2, {"microbatches": 2}),
    (2, 1, {"microbatches": 1}),
    (2, 2, {"microbatches": 4, "schedule": "gpipe"}),
    (2, 2, {"microbatches": 8}),
    (2, 2, {"microbatches": 4, "gradients": "owner"}),
    (2, 2, {"microbatches": 3, "schedule": "interleaved", "stages": 4}),
    (2, 1, {"microbatches": 4, "schedule": "zero-bubble", "checkpoint": "always"}),
    (3, 2, {"microbatches": 5, "schedule": "zero-bubble"}),
    (3, 1, {"microbatches": 4, "schedule": "interleaved", "stages": 6, "gradients": "owner"}),
    (4, 2, {"microbatches": 8, "schedule": "gpipe", "checkpoint": "except_last"}),
    (4, 1, {"microbatches": 8, "stages": ["b", "c", "d"]}),
)


def random_cases(count: int) -> Iterator[Case]:
    """Any schedule, more stages than ranks, micro-batches that may be empty; the same in every process."""
    rng = random.Random(0)
    for _ in range(count):
        schedule, ranks = rng.choice(sorted(SCHEDULES)), rng.choice((1, 2, 3, 4))
        stages = ranks * rng.choice((2, 3)) if schedule == "interleaved" else rng.choice((ranks, ranks + 1))
        options = {
            "schedule": schedule,
            "stages": stages,
            "microbatches": rng.choice((2, 3, 5, 9)),
            "checkpoint": rng.choice(("never", "always")),
            "gradients": rng.choice(("everywhere", "owner")),
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
    layout = MicrobatchSizes.of(sizes, options["microbatches"])
    for rank in range(ranks):
        yield local.writer(layout, rank).write()
