"""Programs for one device, as people write them, by what they are about; `listed` says what a program is."""

from tests.eager.programs import control_flow, layers, losses, samples_that_meet  # noqa: F401
from tests.eager.programs.listed import PROGRAMS, Batch, Program, data, gradients, net

__all__ = ["PROGRAMS", "Batch", "Program", "data", "gradients", "net"]
