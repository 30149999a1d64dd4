"""`PlacedCall`: the operands of a call, with their placements along one batch axis."""

from __future__ import annotations

from dataclasses import dataclass

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.plans.call_leaves import CallLeaves
from fxdp.eager.tensor import GlobalTensor
from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import OpOverload


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """The operands of a call: leaves of its arguments, their placements along one axis."""

    op: OpOverload
    leaves: CallLeaves
    axis: BatchAxis
    placements: tuple[Placement, ...]
    foreign: tuple[bool, ...]
    known: tuple[TensorType, ...]
    """The types by placement alone."""

    @property
    def in_parts(self) -> bool:
        """Whether an operand is sharded or partial."""
        return any(p != R for p in self.placements)

    @property
    def sharded(self) -> bool:
        """Whether an operand is sharded."""
        return any(isinstance(p, Shard) for p in self.placements)


def placed(op: OpOverload, leaves: CallLeaves) -> PlacedCall:
    """Return the operands with their placements along the axis of the largest sharded one."""
    tensors = leaves.tensors
    specs = [t._spec if isinstance(t, GlobalTensor) else None for t in tensors]
    sharded = [
        (t.nbytes, s) for t, s in zip(tensors, specs, strict=True) if s is not None and s.layout.is_sharded
    ]
    if sharded:
        axis = max(sharded, key=lambda found: found[0])[1].axis
    else:
        axis = next(s.axis.ranks.unit for s in specs if s is not None)
    foreign = tuple(s is not None and s.layout.is_sharded and s.axis is not axis for s in specs)
    placements = tuple(R if s is None or f else s.placement for s, f in zip(specs, foreign, strict=True))
    known = tuple(
        TensorType(t.dtype, tuple(t.shape)) if s is None or f else s.type
        for t, s, f in zip(tensors, specs, foreign, strict=True)
    )
    return PlacedCall(op, leaves, axis, placements, foreign, known)
