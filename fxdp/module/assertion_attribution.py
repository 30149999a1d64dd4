"""Which ranks' parts of a batch the model's own code refuses, where its check of the global batch failed.

A program checks the global batch, so all ranks know that something is wrong with it, and none knows whose
part it is. Each runs the model itself on its own part, then, and the ranks tell one another what it said.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fxdp.capture.captured import Check
from fxdp.capture.patches.module_state import unchanged
from fxdp.ir.draws import kept_random_state
from fxdp.ir.model_tensors import is_sharded
from fxdp.module.call import Call
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.process_mesh import ProcessMesh

_AFTER = 3  # lines from a condition to the `raise` below it


def failing_ranks(
    process_mesh: ProcessMesh, module: nn.Module, loss_fn: Any, call: Call, failed: Sequence[Check]
) -> str:
    """What each rank's part does to the model's own checks, a line for each rank; all ranks do this together.

    Empty where no part by itself is to blame.
    """
    words = gather_objects(process_mesh, _raised(module, loss_fn, call, failed) or _not_finite(call))
    return "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(words) if text)


def _raised(module: nn.Module, loss_fn: Any, call: Call, failed: Sequence[Check]) -> str:
    """The error that the model's own code raises at such a check for this rank's part."""
    if not call.batch or any(is_sharded(p) for p in module.parameters()):
        return ""  # of sharded parameters nobody has all
    args, kwargs = call.inputs.copies(t.detach() for t in call.tensors)
    target = kwargs.pop("target", None) if loss_fn is not None else None
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        # of a module under two names torch would leave it these buffers
        with torch.no_grad(), kept_random_state(), unchanged(module):
            output = functional_call(module, buffers, args, kwargs)
            if target is not None:
                loss_fn(output, target)
    except Exception as error:  # whatever the user's code may raise
        places = {(check.location.file, check.location.line + n) for check in failed for n in range(_AFTER)}
        frames = traceback.extract_tb(error.__traceback__)
        if any((frame.filename, frame.lineno) in places for frame in frames):
            return "".join(traceback.format_exception_only(error)).strip()
    return ""


def _not_finite(call: Call) -> str:
    """The inputs that have values which are not finite."""
    pairs = zip(call.inputs.paths, call.tensors, strict=True)
    found = [path for path, tensor in pairs if not _is_finite(tensor)]
    return f"values that are not finite in {', '.join(found)}" if found else ""


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
