"""Rules for reductions of consecutive rows, of which a tensor says how many each segment has.

Law: a segment's result depends on its own rows alone. The rows of a rank are those of its own segments if the
lengths count the rows of an axis (`Operand.counts`), as those of a ragged batch do.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import S
from fxdp.ir.types.sizes import axis
from fxdp.rules.registry import Alternative, Op, rule


@rule("segments", *existing("segment_reduce", "_segment_reduce_backward"))
def _segments(op: Op) -> Iterator[Alternative]:
    """Yield the shard of rows and segments, with the lengths of all segments in one dim."""
    lengths, data = op.arg("lengths"), op.arg("data")
    if lengths is None or lengths.counts is None or op.arg("axis") != 0 or lengths.ndim != 1:
        return
    if data.shape[0] == axis(lengths.counts).total and op.arg("offsets") is None:
        # torch cannot check the lengths of no segments; those of all were checked when they entered
        is_forward = op.target in existing("segment_reduce")
        rewrite = Rewrite(arguments=(("unsafe", True),)) if is_forward else None
        yield op.alternative({operand.index: S(0) for operand in op.operands}, S(0), rewrite)
