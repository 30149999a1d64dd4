"""The order of the passes, as data: what runs between which levels, on the undivided program or on its parts.

              undivided                        in stages or micro-batches
CAPTURED
                                               expose counts, lift scalars    (several micro-batches)
              canonicalize, analyze, expand decompositions, (gather sufficient factors,) (recompute modules,)
              (place parameters,) (cast reductions,) insert collectives
EXPLICIT
              localize                         localize, assign stages
LOCAL                                          STAGED, then cut into parts
              overlap sums,
              (bucket parameters,)             of parameters that are sharded
              (schedule prefetch,)
              bucket, coalesce                 the same, on what runs once after the last micro-batch
              emit                             emit, each part for the sizes of a micro-batch
EMITTED
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxdp.capture.captured import Captured
from fxdp.compiler.pass_manager import Pass
from fxdp.ir.graphs import copy_graph
from fxdp.ir.mesh import Mesh
from fxdp.options import Options
from fxdp.passes.assign_stages import AssignStages
from fxdp.passes.batch_dim_analyzer import BatchDimAnalyzer
from fxdp.passes.bucket_gradients import BucketGradients
from fxdp.passes.bucket_parameters import BucketParameters
from fxdp.passes.bucket_sufficient_factors import BucketSufficientFactors
from fxdp.passes.canonicalize import Canonicalize
from fxdp.passes.cast_reductions import CastReductions
from fxdp.passes.coalesce_reductions import CoalesceReductions
from fxdp.passes.emit_program import EmitProgram
from fxdp.passes.expand_decompositions import ExpandDecompositions
from fxdp.passes.expose_counts import ExposeCounts
from fxdp.passes.gather_sufficient_factors import GatherSufficientFactors
from fxdp.passes.insert_collectives import InsertCollectives
from fxdp.passes.lift_scalars import LiftScalars
from fxdp.passes.localize_shapes import LocalizeShapes
from fxdp.passes.overlap_sums import OverlapSums
from fxdp.passes.place_parameters import PlaceParameters
from fxdp.passes.recompute_modules import RecomputeModules
from fxdp.passes.schedule_prefetch import SchedulePrefetch


@dataclass(frozen=True)
class Order:
    """The passes of one compilation."""

    explicit: tuple[Pass, ...]
    """From CAPTURED to EXPLICIT: the program of the global batch with its communication."""
    local: tuple[Pass, ...]
    """From EXPLICIT to LOCAL: the program of one rank, its sizes still open; to STAGED where it is cut."""
    reductions: tuple[Pass, ...]
    """On LOCAL parts that run once per step: what the ranks add up travels together."""

    @classmethod
    def of(
        cls, captured: Captured, options: Options, stages: int | tuple[str, ...] | None,
        batch: int, kept: frozenset[str] = frozenset(),
    ) -> Order:  # fmt: skip
        """The order for a captured model; `stages` is None for a program that is not cut.

        `batch` is what all ranks have together at first; `kept` are parameters that stays in one piece from
        the forward to the backward where others do not.
        """
        several = stages is not None and options.microbatches > 1
        # what the model computes of its batch size is meant of all micro-batches, so it comes before them
        first: tuple[Pass, ...] = (ExposeCounts(), LiftScalars()) if several else ()
        localize = LocalizeShapes(tuple(captured.symbols))
        # what is cut gathers before its first micro-batch, for all of them
        once = stages is not None or options.keeps_unsharded or options.keeps_unsharded_for_backward
        precision = options.precision
        placed: tuple[Pass, ...] = (PlaceParameters(once, kept),) if options.shards else ()
        again: tuple[Pass, ...] = (RecomputeModules(tuple(options.recompute)),) if options.recompute else ()
        narrow: tuple[Pass, ...] = (CastReductions(precision.reduce),) if precision else ()
        reduce = precision.reduce if precision else None
        # a batch in parts has its factors part by part
        factors: tuple[Pass, ...] = (
            (GatherSufficientFactors(batch, options.shards, reduce),) if stages is None else ()
        )
        rows: tuple[Pass, ...] = (
            (BucketParameters(options.bucket_bytes, kept), SchedulePrefetch(options.keeps_unsharded))
            if options.shards
            else ()
        )
        return cls(
            explicit=(
                *first,
                Canonicalize(),
                BatchDimAnalyzer(captured.batch, options.single_device_rng),
                ExpandDecompositions(),
                *factors,
                *again,
                *placed,
                *narrow,
                InsertCollectives(options.single_device_rng, options.shards and once, kept),
            ),
            local=(localize,) if stages is None else (localize, AssignStages(stages, options.microbatches)),
            reductions=(
                OverlapSums(),
                *rows,
                BucketSufficientFactors(batch),
                BucketGradients(options.bucket_bytes),
                CoalesceReductions(),
            ),
        )


def canonical(captured: Captured, mesh: Mesh) -> Captured:
    """A captured model in the form that the other passes get, beside whose nodes a program is compared."""
    return replace(captured, gm=Canonicalize().run(copy_graph(captured.gm), mesh))


def emission(sizes: Mapping[str, int] | None, even: bool, place: int) -> tuple[Pass, ...]:
    """From LOCAL to EMITTED, for fixed sizes or for any; `place` is that of a part of the batch among all."""
    return (EmitProgram(None if sizes is None else tuple(sizes.items()), even, place),)
