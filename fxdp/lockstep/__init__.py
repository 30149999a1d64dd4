"""The oracle: all ranks of a LOCAL program in one process, node by node against one device."""

from fxdp.lockstep.compare import difference
from fxdp.lockstep.eager import EagerRun, first_samples, run_eager, slot_values
from fxdp.lockstep.fault import Fault, OperandState
from fxdp.lockstep.reference import Reference
from fxdp.lockstep.results import ResultError, compare_results
from fxdp.lockstep.runner import LockStep
from fxdp.lockstep.split import SplitRun, Subject
from fxdp.lockstep.splits import check_splits, default_splits

__all__ = [
    "EagerRun",
    "Fault",
    "LockStep",
    "OperandState",
    "Reference",
    "ResultError",
    "SplitRun",
    "Subject",
    "check_splits",
    "compare_results",
    "default_splits",
    "difference",
    "first_samples",
    "run_eager",
    "slot_values",
]
