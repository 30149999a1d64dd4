"""The oracle: all ranks of a LOCAL program in one process, node by node against one device."""

from fxdp.lockstep.compare import difference
from fxdp.lockstep.fault import Fault, OperandState
from fxdp.lockstep.reference import Reference
from fxdp.lockstep.runner import LockStep

__all__ = ["Fault", "LockStep", "OperandState", "Reference", "difference"]
