"""Extend the core's seams with Python semantics beyond those of `torch.export`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fxdp.capture.joint.static import merge_loops
from fxdp.capture.patches.patch_tables import RecordedEffects, capture_semantics, python_semantics
from fxdp.capture.patches.side_effects import noted_side_effects
from fxdp.capture.patches.tensor_reads import symbolic_len
from fxdp.capture.python import loop_vectorization
from fxdp.capture.python.autograd_functions import AUTOGRAD
from fxdp.capture.python.branch_recording import record_branches
from fxdp.capture.python.flags import FLAGS
from fxdp.capture.python.inner_gradients import INNER_GRADIENTS, MarkedWhenMade
from fxdp.capture.python.library_choices import library_choices
from fxdp.capture.python.norm_averages import NORMS
from fxdp.capture.python.raise_checks import checks
from fxdp.capture.python.substitutes import SUBSTITUTES
from fxdp.capture.python.tensor_slices import TensorSlices
from fxdp.capture.python.unit_draws import UNIT_DRAWS
from fxdp.capture.taken_branches import taken_branches
from fxdp.torch_compat import Patch, one_device, patched


def _of_capture(
    _own: Callable[..., Any], module: nn.Module, loss_fn: Callable[..., Any] | None
) -> tuple[Patch, ...]:
    return (*one_device(), *NORMS, *SUBSTITUTES, *library_choices(), symbolic_len(module, loss_fn))


@contextlib.contextmanager
def _of_code(_own: Callable[..., Any], effects: RecordedEffects) -> Iterator[None]:
    patches = (*AUTOGRAD, *INNER_GRADIENTS, *FLAGS, *checks(effects.asked), *UNIT_DRAWS)
    slices = TensorSlices(effects.asked.told)
    effects.at_end.append(slices.settle)
    with noted_side_effects(effects.beside), MarkedWhenMade(), patched(patches), slices:
        yield


def extend() -> None:
    """Extend all seams; called once, when the first model is captured."""
    capture_semantics.extend(_of_capture)
    python_semantics.extend(_of_code)
    merge_loops.extend(lambda _own, gm, batch: loop_vectorization.merge_loops(gm, batch))
    taken_branches.extend(record_branches)
