"""Programs in stages and micro-batches: from a captured model to what each rank runs in a step."""

from fxdp.pipeline.prepare import check_options, prepare_staged
from fxdp.pipeline.program import StagedProgram

__all__ = ["StagedProgram", "check_options", "prepare_staged"]
