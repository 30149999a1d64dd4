"""The tables of patches: what is different while a model is captured, and while its own code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxdp import torch_compat
from fxdp.capture.captured import LayoutRead, ReadValue
from fxdp.capture.patches.autograd_functions import AUTOGRAD
from fxdp.capture.patches.checkpoints import REENTRANT
from fxdp.capture.patches.flags import FLAGS
from fxdp.capture.patches.inner_gradients import INNER_GRADIENTS, MarkedWhenMade
from fxdp.capture.patches.norm_averages import NORMS
from fxdp.capture.patches.raise_checks import AskedChecks, checks
from fxdp.capture.patches.random_numbers import UNIT_DRAWS, RefusedGenerators, python_draws, seedings
from fxdp.capture.patches.silence import SILENCE, unwarned
from fxdp.capture.patches.substitutes import SUBSTITUTES
from fxdp.capture.patches.tensor_reads import DATA, TEXTS, layout_reads, symbolic_len, value_reads
from fxdp.capture.patches.tensor_slices import TensorSlices
from fxdp.capture.patches.unbacked_hints import HintedNumber
from fxdp.capture.refusals.dense_only import DenseOnly
from fxdp.capture.refusals.parameter_changes import unchanged_parameters
from fxdp.ir.draws import kept_random_state
from fxdp.ir.graphs import no_collection
from fxdp.ir.metadata import Location
from fxdp.torch_compat import Patch, around, aten, patched

_WRONGLY_DECOMPOSED = aten.multilabel_margin_loss_forward.default
"""torch 2.13's Python decomposition counts targets after the first -1; its kernel does not."""


def _convert(
    plain: Callable[..., nn.Module], self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """`module.to(dtype)` in a forward would exchange parameters, also where it changes nothing: not there."""
    own = (*self.parameters(recurse), *self.buffers(recurse))
    if all((made := fn(t)).dtype == t.dtype and made.device == t.device for t in own):
        return self
    return plain(self, fn, recurse)


def _replace(plain: Callable[..., None], self: torch_compat.ShapeEnv, *equality: Any) -> None:
    """Torch puts one size for another that equals it. Its bounds of sizes pass through floats, and where they
    come out above the largest integer it fails: the equality is asserted all the same, only nothing replaced.
    """
    try:
        plain(self, *equality)
    except AssertionError as error:
        if "not a subset of" not in str(error):
            raise


ALL_OF_CAPTURE: tuple[Patch, ...] = (
    *SILENCE,
    *NORMS,
    *SUBSTITUTES,
    REENTRANT,
    *torch_compat.LSTM_STATES,
    Patch(nn.Module, "_apply", around(_convert)),
    Patch(torch_compat.ShapeEnv, "_set_replacement", around(_replace)),
    Patch(*torch_compat.NODE_SUMMARY, around(lambda plain, value: None)),  # nobody reads it here
)
"""From the first trace to the joint graph: the backward of a user's function runs after the export."""


@dataclass
class RecordedEffects:
    """What one run of the model's code said by what it called."""

    asked: AskedChecks = field(default_factory=AskedChecks)
    layout_reads: list[LayoutRead] = field(default_factory=list)
    read_values: dict[int, ReadValue] = field(default_factory=dict)
    seeded: list[tuple[str, Location]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """What is heard of slices is told, too."""
        self.slices = TensorSlices(self.asked.told)


@contextlib.contextmanager
def recording_effects(
    module: nn.Module,
    tensors: Sequence[Tensor],
    branches: tuple[bool, ...] | None = (),
    told: Sequence[HintedNumber] = (),
) -> Iterator[RecordedEffects]:
    """Around one run of the model's code, which goes these ways at flags of the batch and is told numbers.

    Raises
    ------
    CaptureError : the code does what no graph can hold, with its line.
    """
    effects = RecordedEffects(AskedChecks(branches, told))
    # while the model's code runs alone: torch's tracing before and after it has torch as it is
    patches = (
        *AUTOGRAD,
        *INNER_GRADIENTS,
        DATA,
        *TEXTS,
        *layout_reads(effects.layout_reads, module, tensors),
        *value_reads(effects.read_values),
        *seedings(effects.seeded),
        *FLAGS,
        *checks(effects.asked),
        *python_draws(),
        *UNIT_DRAWS,
        *unchanged_parameters(module),
    )
    with DenseOnly(), MarkedWhenMade(), patched(patches), RefusedGenerators(), effects.slices:
        yield effects


@contextlib.contextmanager
def capture_patches(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Everything that is different while a model is captured; leaves no trace."""
    with contextlib.ExitStack() as stack:
        # Tracing draws no number that the user could miss later, nor seeds anything. The generators are the
        # process's: another thread draws again what it draws meanwhile, as while torch itself traces.
        stack.enter_context(kept_random_state())
        stack.enter_context(no_collection())
        stack.enter_context(torch_compat.memoized_sizes())
        stack.enter_context(torch_compat.memoized_fakes())
        stack.enter_context(torch_compat.memoized_stacks())
        stack.enter_context(torch_compat.memoized_trees())
        stack.enter_context(torch_compat.lazy_codegen())
        here = stack.enter_context(patched((*ALL_OF_CAPTURE, symbolic_len(module, loss_fn))))
        stack.enter_context(unwarned(here))
        stack.enter_context(torch_compat.without_autograd_kernel(_WRONGLY_DECOMPOSED))
        if torch.is_inference_mode_enabled():
            # tensors that are made in inference mode cannot be traced; without gradients they can be
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield
