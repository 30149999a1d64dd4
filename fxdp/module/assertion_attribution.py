"""Find the ranks whose local batch makes a user assertion fail, after the global check has failed.

A program checks the global batch, so all ranks know that a check fails, but not which rank's part is the
cause. Therefore each rank runs the model itself on its own part, and the ranks exchange the errors.
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
from fxdp.ir.graph.draws import kept_random_state
from fxdp.ir.graph.model_tensors import is_sharded
from fxdp.module.calls.call import Call
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.process_mesh import ProcessMesh

_AFTER = 3  # lines from a condition to the following `raise`


def failing_ranks(
    process_mesh: ProcessMesh, module: nn.Module, loss_fn: Any, call: Call, failed: Sequence[Check]
) -> str:
    """Return one line for each rank whose part fails the model's own checks; a collective call.

    Empty if no part alone is the cause.
    """
    own = _raised(module, loss_fn, call, failed)
    pairs = zip(call.inputs.paths, call.tensors, strict=True)
    if not own and (found := [path for path, tensor in pairs if not _is_finite(tensor)]):
        own = f"values that are not finite in {', '.join(found)}"
    words = gather_objects(process_mesh, own)
    return "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(words) if text)


def _raised(module: nn.Module, loss_fn: Any, call: Call, failed: Sequence[Check]) -> str:
    """Return the error that the model's own code raises at a failed check for this rank's part."""
    if not call.batch or any(is_sharded(p) for p in module.parameters()):
        return ""  # no rank has full values of sharded parameters
    args, kwargs = call.inputs.copies(t.detach() for t in call.tensors)
    target = kwargs.pop("target", None) if loss_fn is not None else None
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        # otherwise torch would leave these buffers in a module registered under two names
        with torch.no_grad(), kept_random_state(), unchanged(module):
            output = functional_call(module, buffers, args, kwargs)
            if target is not None:
                loss_fn(output, target)
    except Exception as error:  # user code may raise any exception
        places = {(check.location.file, check.location.line + n) for check in failed for n in range(_AFTER)}
        frames = traceback.extract_tb(error.__traceback__)
        if any((frame.filename, frame.lineno) in places for frame in frames):
            return "".join(traceback.format_exception_only(error)).strip()
    return ""


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
