"""Tables of all patches: patches for the entire capture, and patches for runs of the user's code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxdp import torch_compat
from fxdp.capture.captured import SideEffect
from fxdp.capture.patches.asked_checks import AskedChecks
from fxdp.capture.patches.checkpoints import REENTRANT
from fxdp.capture.patches.optimizer_steps import refused_steps
from fxdp.capture.patches.plain_semantics import REFUSED, RefusedCollectives
from fxdp.capture.patches.python_draws import refused_draws
from fxdp.capture.patches.random_numbers import RefusedGenerators, seedings
from fxdp.capture.patches.silence import SILENCE, unwarned
from fxdp.capture.patches.size_questions import SizeQuestions
from fxdp.capture.patches.tensor_reads import TEXT, TensorReads
from fxdp.capture.patches.unbacked_hints import HintedNumber
from fxdp.capture.refusals.dense_only import DenseOnly
from fxdp.capture.refusals.parameter_changes import unchanged_parameters
from fxdp.ir.graph.draws import kept_random_state
from fxdp.ir.graph.graphs import no_collection
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch, around, aten, patched
from fxdp.wings import seam

_WRONGLY_DECOMPOSED = aten.multilabel_margin_loss_forward.default
"""An op that torch 2.13 decomposes wrongly: targets after the first -1 count, unlike in the kernel."""


def _convert(
    plain: Callable[..., nn.Module], self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Skip `module.to(dtype)` in a forward if nothing would change; torch would replace parameters anyway."""
    own = (*self.parameters(recurse), *self.buffers(recurse))
    if all((made := fn(t)).dtype == t.dtype and made.device == t.device for t in own):
        return self
    return plain(self, fn, recurse)


def _replace(plain: Callable[..., None], self: torch_compat.ShapeEnv, *equality: Any) -> None:
    """Replace one size by an equal size, except where torch's bounds fail.

    Torch's bounds of sizes pass through floats, and torch raises if they exceed the largest integer. The
    equality is asserted in any case; then only the replacement is skipped.
    """
    try:
        plain(self, *equality)
    except AssertionError as error:
        if "not a subset of" not in str(error):
            raise


_ALL_OF_CAPTURE: tuple[Patch, ...] = (
    *SILENCE,
    REENTRANT,
    *torch_compat.LSTM_STATES,
    Patch(nn.Module, "_apply", around(_convert)),
    Patch(torch_compat.ShapeEnv, "_set_replacement", around(_replace)),
    Patch(*torch_compat.NODE_SUMMARY, around(lambda plain, value: None)),  # never read during capture
)
"""Patches from the first trace to the joint graph: backwards of user functions run after the export."""


@seam("python")
def capture_semantics(module: nn.Module, loss_fn: Callable[..., Any] | None) -> tuple[Patch, ...]:
    """Return further patches for all of a capture."""
    return ()


@seam("startup")
def around_capture() -> AbstractContextManager[None]:
    """Return a context in which all of a capture runs, made once for each."""
    return contextlib.nullcontext()


@dataclass
class RecordedEffects:
    """Effects recorded in one run of the model's code."""

    asked: AskedChecks
    reads: TensorReads
    sizes: SizeQuestions = field(default_factory=SizeQuestions)
    seeded: list[tuple[str, Location]] = field(default_factory=list)
    beside: list[SideEffect] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the code has run; each may refuse what the code did."""

    def settle(self) -> None:
        """Complete the record at the end of the run.

        Raises
        ------
        CaptureError : the code did something that no graph can hold.
        """
        self.asked.settle()
        for check in self.at_end:
            check()


@contextlib.contextmanager
def recording_effects(
    module: nn.Module,
    tensors: Sequence[Tensor],
    branches: tuple[bool, ...] | None = (),
    told: Sequence[HintedNumber] = (),
    *,
    watches_draws: bool = False,
) -> Iterator[RecordedEffects]:
    """Record the effects of one run of the model's code inside the block.

    `branches` are the decisions at flags of the batch; `told` are hints for numbers that the code reads.

    Raises
    ------
    CaptureError : the code does something that no graph can hold; the error names the line.
    UncheckedDrawError : the code draws or seeds in Python and `watches_draws` is false; run it again with it.
    """
    asked = AskedChecks(branches, told)
    effects = RecordedEffects(asked, TensorReads(module, tensors, asked.must))
    # only active while the model's code runs: torch's tracing before and after uses unpatched functions
    patches = (TEXT, effects.sizes.patch(), *seedings(effects.seeded))
    # last, so that a hook on a parameter is refused before the wing makes it a part of the backward
    kept = patched(unchanged_parameters(module))
    with (
        refused_draws(watches_draws, effects.beside), DenseOnly(), effects.reads, patched(patches),
        RefusedGenerators(), refused_steps(), python_semantics(effects), kept,
    ):  # fmt: skip
        yield effects


@seam("python")
@contextlib.contextmanager
def python_semantics(effects: RecordedEffects) -> Iterator[None]:
    """Run the model's code once inside the block; without the wing, what it needs is refused."""
    with patched(REFUSED), RefusedCollectives():
        yield


@contextlib.contextmanager
def capture_patches(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Activate all patches of capture inside the block, and undo them afterwards."""
    with contextlib.ExitStack() as stack:
        # Tracing must not advance or seed the generators. Generators belong to the process: random numbers
        # drawn by another thread in the meantime repeat, as they do while torch itself traces.
        stack.enter_context(kept_random_state())
        stack.enter_context(no_collection())
        stack.enter_context(around_capture())
        here = stack.enter_context(patched((*_ALL_OF_CAPTURE, *capture_semantics(module, loss_fn))))
        stack.enter_context(unwarned(here))
        stack.enter_context(torch_compat.without_autograd_kernel(_WRONGLY_DECOMPOSED))
        if torch.is_inference_mode_enabled():
            # tensors created in inference mode cannot be traced, tensors without gradients can
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield
