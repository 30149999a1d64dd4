"""`capture`: symbolic first; where the model fixes its batch size, fitted from several static traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.export.examples import batch_hint, static_hints
from fxdp.capture.export.exported import Exported, export
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.inputs import Inputs, batch_size, flatten_inputs, resolve_batch_dims
from fxdp.capture.joint import BatchSpecializedError, JointOptions, fitted_joint, symbolic_joint
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.convert import convert
from fxdp.capture.joint.raw_joint import trace_joint
from fxdp.capture.joint.single_sample import draws_numbers, for_one, for_several
from fxdp.capture.joint.static import StaticMismatchError
from fxdp.capture.patches.autograd_functions import check_module_hooks
from fxdp.capture.patches.module_state import WrittenError, numbers_of, unchanged
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.capture.patches.random_numbers import seeding_error
from fxdp.capture.refusals.diagnose import capture_error, eager_error, is_data_dependent
from fxdp.capture.refusals.stateful import check_memory
from fxdp.capture.refusals.survey import Survey, survey
from fxdp.errors import CaptureError, FxdpError, InputError
from fxdp.torch_compat import compile_lock


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch_dims: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    dynamic: bool = False,
    differentiable: str = "loss",
    couple: bool = True,
    own_statistics: bool = False,
    hint: int | None = None,
    whole_draws: bool = False,
) -> Captured:
    """Capture `module(*args, **kwargs)` and its backward as one graph in global shapes.

    batch_dims      pytree prefix over `(args, kwargs)` of int or None; default: dim 0 of every tensor
    loss_fn         the program becomes `loss_fn(module(*args, **kwargs), target)`; `target` is a keyword
    dynamic         make all sizes of the inputs symbolic, not only the batch
    differentiable  "loss": only the scalar output named `loss` gets a tangent, without one the first scalar,
                    and without scalars every output; "all": every output
    couple          spell out ops that couple samples as sums and counts; False keeps eager's own ops
    own_statistics  BatchNorm normalizes each part of the batch by the part's own statistics
    hint            batch size to trace with: for code that branches on the batch size, whose
                    `Captured.conditions` do not hold at the size that is wanted; 1, with `whole_draws`:
                    the capture is for a single sample, for which random numbers may come in another order
    whole_draws     random numbers are one device's for the whole batch (`joint/single_sample.py`)

    Under `torch.no_grad()` the graph is the forward alone.
    """
    _check_request(module, kwargs, loss_fn, differentiable, hint, 1 if whole_draws else 2)
    check_module_hooks(module)
    inputs = flatten_inputs(module, args, kwargs)
    batch = tuple(resolve_batch_dims(args, kwargs, batch_dims))
    batch_size(inputs.tensors, batch, inputs.paths)
    with compile_lock, unchanged(module), capture_patches(module, loss_fn):
        program = FlatModule(module, inputs, loss_fn)
        how = JointOptions(differentiable, couple, own_statistics)
        request = Request(program, module, inputs, batch, dynamic, how)
        several = hint if hint is not None and hint > 1 else batch_hint(inputs.tensors, batch)
        found, request = _capture(request, several)
        seeded = request.program.record.seeded
        if seeded and draws_numbers(found.gm.graph):
            raise seeding_error(*seeded[0])
        if whole_draws:
            found = _for_one(found, request) if hint == 1 else for_several(found)
    record = request.program.record
    check_memory(record.changed, module, inputs, loss_fn)
    return replace(found, layout_reads=record.layout_reads)


def capture_exported(exported: Exported, options: JointOptions | None = None) -> Captured:
    """The joint graph of a forward graph that was traced elsewhere, with a symbolic batch; it is used up.

    Raises
    ------
    CaptureError : the batch size is a constant of the graph, or the graph holds what no program can run.
    """
    with compile_lock, capture_patches(exported.gm, None):
        try:
            return symbolic_joint(exported, options or JointOptions())
        except FxdpError:
            raise
        except BatchSpecializedError as error:  # no user's code is here to be traced at other sizes
            raise CaptureError(
                f"{error}; expected a graph whose batch dims are symbols: trace it with dynamic shapes"
            ) from error
        except Exception as error:
            raise capture_error(error) from error


@dataclass(frozen=True)
class Request:
    """What is to be captured, and how (see `capture`)."""

    program: FlatModule
    module: nn.Module
    inputs: Inputs
    batch: tuple[int | None, ...]
    dynamic: bool
    joint: JointOptions


def _export(request: Request, hint: int, *, symbolic: bool) -> Exported:
    return export(request.program, request.batch, hint, symbolic=symbolic, dynamic=request.dynamic)


def _capture(request: Request, hint: int) -> tuple[Captured, Request]:
    """The capture, and the request that led to it."""
    try:
        return symbolic_joint(_export(request, hint, symbolic=True), request.joint), request
    except (CaptureError, InputError):
        raise
    except Exception as error:
        if is_data_dependent(error):
            found = survey(request.module, request.inputs, request.program.loss_fn)
            return _with_numbers(error, request, hint, found)
        return _fall_back(error, request), request


def _with_numbers(error: Exception, request: Request, hint: int, found: Survey) -> tuple[Captured, Request]:
    """Capture once more with small buffers as numbers: it may be their values that the code reads."""
    numbers = {} if request.program.numbers else numbers_of(request.module, found.read, found.written)
    if numbers:
        program = FlatModule(request.module, request.inputs, request.program.loss_fn, numbers)
        with contextlib.suppress(CaptureError, WrittenError):
            captured, request = _capture(replace(request, program=program), hint)
            return replace(captured, numbers=tuple(numbers)), request
    raise capture_error(error, reads=found.reads) from error


def _for_one(found: Captured, request: Request) -> Captured:
    """The capture with its draws as those of a single sample."""
    if not draws_numbers(found.gm.graph):
        return found
    try:
        raw = trace_joint(_export(request, 1, symbolic=False), request.joint)
    except (CaptureError, InputError):
        raise
    except Exception as error:
        raise capture_error(error) from error
    return for_one(found, convert(raw, Sizes()).gm.graph)


def _fall_back(error: Exception, request: Request) -> Captured:
    """Fit the graph from static traces; if these fail too, report what is nearest to the user's code."""
    try:
        batches = static_hints(request.inputs.tensors, request.batch)
        exports = (_export(request, size, symbolic=False) for size in batches)
        return fitted_joint(batches, exports, request.joint)
    except (CaptureError, InputError):
        raise
    except StaticMismatchError as mismatch:
        reads = survey(request.module, request.inputs, request.program.loss_fn).reads
        raise capture_error(error, str(mismatch), reads) from error
    except Exception as second:
        found = survey(request.module, request.inputs, request.program.loss_fn)
        if found.error is not None and not found.reads:
            raise eager_error(found.error) from found.error
        raise capture_error(second, reads=found.reads, only_at=_only_at(request, found)) from second


def _only_at(request: Request, found: Survey) -> int | None:
    """The given batch size, if the model runs at it but not with one sample less."""
    tensors, dims = request.inputs.tensors, request.batch
    given = batch_size(tensors, dims, request.inputs.paths)
    if not found.runs or given is None or given < 2:
        return None
    fewer = [t if d is None else t.narrow(d, 0, given - 1) for t, d in zip(tensors, dims, strict=True)]
    return None if survey(request.module, request.inputs, request.program.loss_fn, fewer).runs else given


def _check_request(
    module: nn.Module,
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    differentiable: str,
    hint: int | None,
    least: int,
) -> None:
    """Refuse requests that cannot be meant."""
    if differentiable not in ("loss", "all"):
        raise InputError(f'differentiable must be "loss" or "all", got {differentiable!r}')
    if hint is not None and hint < least:
        raise InputError(f"hint must be a batch size of at least {least}, got {hint}")
    if loss_fn is not None and "target" not in kwargs:
        raise InputError(
            "with loss_fn= the call needs the keyword argument target=, the loss's second argument"
        )
    if isinstance(loss_fn, nn.Module):
        own = {id(parameter) for parameter in module.parameters()}
        loose = [name for name, p in loss_fn.named_parameters() if p.requires_grad and id(p) not in own]
        if loose:
            raise CaptureError(
                f"loss_fn has trainable parameters of its own ({', '.join(loose)}), which the module's state "
                "does not hold. Make the loss a part of the module and let the module return it"
            )
