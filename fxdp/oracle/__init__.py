"""All ranks of a program in one process, node by node beside one device: what `fxdp.verify` runs."""

from fxdp.oracle.compare import difference
from fxdp.oracle.fault import Fault, OperandState
from fxdp.oracle.lockstep import LockStep
from fxdp.oracle.one_device import EagerRun, first_samples, input_values, run_eager
from fxdp.oracle.reference import Reference
from fxdp.oracle.results import ResultError, compare_results
from fxdp.oracle.splits import check_splits, default_splits
from fxdp.oracle.virtual_run import SplitRun, Subject

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
    "input_values",
    "run_eager",
]
