"""Refuse combinations of options, mesh and model that a program cannot have, before anything is compiled."""

from __future__ import annotations

from torch import fx

from fxdp.capture.captured import Captured
from fxdp.errors import InputError, MeshError, ScheduleError, StageError
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import tensor_type
from fxdp.ir.graph.signature import Parameter
from fxdp.ir.types.mesh import REPLICATE, SHARD, Mesh
from fxdp.options import Options
from fxdp.pipeline.cut.phases import fault_lines
from fxdp.pipeline.schedule.action import Kind
from fxdp.pipeline.schedule.schedule import Schedule

_SHARDABLE = "('dp',), ('dp_shard',) or ('dp_replicate', 'dp_shard'), with 'pp' or without"


def check_sharding(mesh: Mesh, options: Options) -> None:
    """Refuse a strategy that the mesh does not support.

    Raises
    ------
    MeshError : names the axes that the strategy supports.
    """
    axes = set(mesh.axes)
    if not options.shards:
        if SHARD in axes:
            raise MeshError(
                f"the mesh has an axis {SHARD!r}, but strategy={options.strategy!r} shards nothing; expected "
                f"strategy='shard' or 'optimizer', or that axis under the name 'dp'"
            )
        return
    if axes not in ({"dp"}, {SHARD}, {REPLICATE, SHARD}):
        raise MeshError(
            f"strategy={options.strategy!r} on a mesh of axes {mesh.axes}: expected {_SHARDABLE}; parameters "
            f"are sharded along {SHARD!r}, or along the only axis"
        )
    if options.block is not None and mesh.shard_axis is not None:
        raise MeshError(
            f"numerics={options.numerics} with strategy={options.strategy!r} on a mesh of axes {mesh.axes}: "
            "sums along one axis and then the other have another order; expected one data axis"
        )
    size = mesh.size_along(mesh.shard_axis)
    if size > 1 and options.post_forward_size and size % options.post_forward_size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise MeshError(
            f"reshard_after_forward={options.post_forward_size}, but parameters are sharded over {size} "
            f"ranks; expected a divisor of that, {divisors}: the size of groups that keep a full copy each"
        )
    if mesh.pipeline.size > 1 and options.pipeline.gradients == "owner":
        raise MeshError(
            f"fxdp.Pipeline(gradients='owner') with strategy={options.strategy!r}: each pipeline rank holds "
            "and steps rows of all stages' parameters, so gradients go where their rows are; leave "
            "gradients= out"
        )


def check_options(mesh: Mesh, options: Options) -> None:
    """Refuse options that do not work with stages or micro-batches.

    Raises
    ------
    MeshError : `rng="single-device"`; with blocks, stages that Inductor compiles and the mesh cuts.
    """
    if options.fuses_blocks and mesh.pipeline.size > 1 and options.pipeline.stages is None:
        raise MeshError(
            f"numerics={options.numerics} with Inductor on a mesh with a pp axis: ops are fused within a "
            "stage, so the bits are those of a cut; expected fxdp.Pipeline(stages=...), a number or names, "
            "equal on every mesh, also on one device; or backend='eager', where no cut changes bits"
        )
    if options.single_device_rng:
        raise MeshError(
            'rng="single-device" draws all numbers of the batch in the order of one device, which stages '
            'and micro-batches do not keep; expected rng="sharded" with a pp axis or '
            "fxdp.Pipeline(microbatches=...) above 1"
        )


def check_schedule(schedule: Schedule, options: Options) -> None:
    """Refuse a schedule that divides backwards of blocks, whose ops Inductor would fuse in another way.

    Raises
    ------
    ScheduleError : names schedules that divide none.
    """
    divided = any(action.kind is Kind.INPUT_GRADIENT for row in schedule.ranks for action in row)
    if options.fuses_blocks and divided:
        raise ScheduleError(
            f"numerics={options.numerics} with Inductor and schedule={options.pipeline.schedule!r}, which "
            "computes gradients of weights apart: they would be fused otherwise than on one device; expected "
            "'1f1b', 'gpipe' or 'interleaved', or backend=\"eager\" on every mesh"
        )


def check_coupled(coupled: list[fx.Node], options: Options) -> None:
    """Refuse what blocks that wait for one another at these collectives cannot do.

    Raises
    ------
    ScheduleError, StageError : an order that is not theirs, or forwards that would be recomputed; names the
        collectives with their lines.
    """
    if not coupled:
        return
    if options.pipeline.schedule is not None:
        raise ScheduleError(
            f"schedule={options.pipeline.schedule!r} with numerics={options.numerics}: blocks wait for one "
            "another, so each stage runs all of them up to there and then goes on:\n"
            f"  {fault_lines(coupled)}\nExpected no schedule="
        )
    again = options.activation_checkpointing
    if again.mode != "never" or again.memory_budget < 1:
        raise StageError(
            f"activation_checkpointing={again} with numerics={options.numerics}: a forward of a block waits "
            f"for the other blocks, and cannot run a second time alone:\n  {fault_lines(coupled)}\nExpected "
            "activation_checkpointing=[...], names of modules without these lines, or nothing"
        )


def check_ragged_blocks(captured: Captured, options: Options) -> None:
    """Refuse blocks of a ragged batch that Inductor compiles.

    Raises
    ------
    InputError : names the backend that has the same bits.
    """
    if captured.axes.names and options.block is not None and options.backend == "inductor":
        raise InputError(
            f"a ragged batch (fxdp.Rows in batch_dims=) with numerics={options.numerics}: each block has its "
            "own sizes, and Inductor fuses code for any size as suits those of the rank's first block; "
            'expected backend="eager" on every mesh'
        )


def check_reductions(captured: Captured, options: Options) -> None:
    """Refuse a `reduce_dtype` that would round gradients accumulated over micro-batches.

    Raises
    ------
    MeshError : names the `reduce_dtype` that does not round.
    """
    precision = options.precision
    if precision is None or precision.reduce is None:
        return
    dtypes = {tensor_type(node).dtype for _, node in inputs_of(captured.gm.graph, Parameter)}
    other = sorted(str(dtype) for dtype in dtypes if dtype != precision.reduce)
    if other:
        raise MeshError(
            f"mp_policy sums gradients in {precision.reduce}, but the parameters are {', '.join(other)} and "
            "stages or micro-batches add their gradients up before that, which would round running sums; "
            f"expected MixedPrecisionPolicy(..., reduce_dtype={other[0]})"
        )
