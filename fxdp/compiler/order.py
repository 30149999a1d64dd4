"""The order of the passes, as data: which passes run between two levels, on the uncut program or on parts.

              not cut                          in stages or micro-batches
CAPTURED
                                               expose counts, lift scalars    (several micro-batches)
              canonicalize, analyze, expand decompositions, (gather sufficient factors,) (recompute modules,)
              (place parameters,) (cast reductions,) insert collectives
EXPLICIT
              localize                         (slice sums,) localize, (count masked rows,) assign stages
LOCAL                                          STAGED, then cut into parts
              overlap sums,
              (bucket parameters,)             only with sharded parameters
              (schedule prefetch,)
              bucket, coalesce                 the same, on parts that run once after the last micro-batch
              emit                             emit, each part for the sizes of a micro-batch,
                                               sum by tree        (blocks)
EMITTED
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxdp.capture.captured import Captured
from fxdp.compiler.pass_manager import Pass
from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.types.mesh import Mesh
from fxdp.options import Options
from fxdp.passes.assign_stages import AssignStages
from fxdp.passes.attend_within_samples import AttendWithinSamples
from fxdp.passes.batch_dim_analyzer import BatchDimAnalyzer
from fxdp.passes.bucket_gradients import BucketGradients
from fxdp.passes.bucket_parameters import BucketParameters
from fxdp.passes.bucket_sufficient_factors import BucketSufficientFactors
from fxdp.passes.canonicalize import Canonicalize
from fxdp.passes.cast_reductions import CastReductions
from fxdp.passes.coalesce_reductions import CoalesceReductions
from fxdp.passes.count_masked_rows import CountMaskedRows
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
from fxdp.passes.slice_sums import SliceSums
from fxdp.passes.sum_by_tree import SumByTree


@dataclass(frozen=True)
class Order:
    """The passes of one compilation."""

    explicit: tuple[Pass, ...]
    """From CAPTURED to EXPLICIT: the program of the global batch, with collectives."""
    local: tuple[Pass, ...]
    """From EXPLICIT to LOCAL: the program of one rank with symbolic sizes; to STAGED for a cut program."""
    reductions: tuple[Pass, ...]
    """On LOCAL parts that run once per step: these passes pack reductions into few collectives."""

    @classmethod
    def of(
        cls, captured: Captured, options: Options, stages: int | tuple[str, ...] | None,
        batch: int, kept: frozenset[str] = frozenset(),
    ) -> Order:  # fmt: skip
        """Return the order for a captured model; `stages` is None for a program that is not cut.

        `batch` is the number of samples of all ranks together in the first call; `kept` are the names of
        parameters that stay unsharded from the forward to the backward under `strategy="shard"`.
        """
        several = stages is not None and options.has_microbatches
        # values that the model computes from its batch size concern all micro-batches, so they come first
        first: tuple[Pass, ...] = (ExposeCounts(), LiftScalars()) if several else ()
        localize: tuple[Pass, ...] = (
            LocalizeShapes(tuple(captured.symbols), captured.axes.further, captured.axes.points),
            *((CountMaskedRows(),) if several else ()),
        )
        # a program that is cut gathers before its first micro-batch, once for all of them
        once = stages is not None or options.keeps_unsharded or options.keeps_unsharded_for_backward
        precision = options.precision
        placed: tuple[Pass, ...] = (PlaceParameters(once, kept),) if options.shards else ()
        modules = tuple(options.activation_checkpointing.modules)
        again: tuple[Pass, ...] = (RecomputeModules(modules),) if modules else ()
        slices: tuple[Pass, ...] = (SliceSums(),) if options.block is not None else ()
        narrow: tuple[Pass, ...] = (CastReductions(precision.reduce),) if precision else ()
        reduce = precision.reduce if precision else None
        # a batch in micro-batches would gather sufficient factors once per micro-batch; of a ragged one only
        # the size of its own axis is known here
        factors: tuple[Pass, ...] = (
            (GatherSufficientFactors(batch, options.shards, reduce),)
            if stages is None and not captured.axes.further
            else ()
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
                AttendWithinSamples(captured.batch, captured.axes.meanings),
                BatchDimAnalyzer(
                    captured.batch,
                    options.single_device_rng,
                    captured.axes.meanings,
                    bears_axes=options.block is None,
                ),
                ExpandDecompositions(),
                *factors,
                *again,
                *placed,
                *narrow,
                InsertCollectives(options.single_device_rng, options.shards and once, kept),
            ),
            local=(
                localize
                if stages is None
                else (*slices, *localize, AssignStages(stages, options.pipeline.microbatches, options.block))
            ),
            reductions=(
                OverlapSums(),
                *rows,
                BucketSufficientFactors(batch),
                BucketGradients(options.bucket_bytes),
                CoalesceReductions(),
            ),
        )


def canonical(captured: Captured, mesh: Mesh) -> Captured:
    """Return a captured model in canonical form, the input of all later passes.

    Programs are compared with this form, node by node.
    """
    gm = Canonicalize().run(copy_graph(captured.gm), mesh)
    within = AttendWithinSamples(captured.batch, captured.axes.meanings)
    return replace(captured, gm=within.run(gm, mesh))


def emission(
    sizes: Mapping[str, int] | None,
    even: bool,
    place: int,
    blocks: tuple[tuple[int, ...], int] | None = None,
) -> tuple[Pass, ...]:
    """Return the passes from LOCAL to EMITTED, for fixed `sizes`, or for any sizes if None.

    `place` is the index of this part of the batch among the parts of all ranks and micro-batches; `blocks`
    are the ranks' batches and the samples of a block, for a part that reduces sums over blocks.
    """
    emit = EmitProgram(None if sizes is None else tuple(sizes.items()), even, place)
    return (emit,) if blocks is None else (emit, SumByTree(*blocks))
