"""Capture a model: by the first strategy that works (`capture_strategies.py`), or say why none does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fxdp.capture.attempt import CaptureAttempt, Made, NothingFitsError, Tracer, traced
from fxdp.capture.capture_strategies import STRATEGIES, first_that_works
from fxdp.capture.captured import Captured, LeftStrategy
from fxdp.capture.export.exported import batch_hint
from fxdp.capture.external_state import external_state
from fxdp.capture.inputs import run_model
from fxdp.capture.joint.annotate_joint import annotate_joint
from fxdp.capture.joint.batch_size_one_rng import for_one, for_several
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.raw_joint import trace_joint
from fxdp.capture.joint.static import StaticMismatchError
from fxdp.capture.locations import Origin
from fxdp.capture.patches.module_state import unchanged
from fxdp.capture.patches.outside_state import ExternalState
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.capture.patches.random_numbers import seeding_error
from fxdp.capture.python_values import SpecializationError, deciding
from fxdp.capture.refusals.diagnose import OnlyAt, capture_error, eager_error, fixed_rows_error
from fxdp.capture.refusals.eager_probe import EagerProbe
from fxdp.capture.refusals.stateful import check_memory, warn_of_side_effects
from fxdp.capture.request import Guarded, Request
from fxdp.errors import CaptureError, FxdpError, InputError, TorchMismatchError
from fxdp.ir.graph.draws import graph_draws
from fxdp.ir.graph.user_lines import show_user_lines
from fxdp.torch_compat import compile_lock

_log = logging.getLogger("fxdp")


def capture_request(request: Request) -> Captured:
    """The module's forward and backward as one graph in global shapes.

    Raises
    ------
    CaptureError : the model cannot be captured, with the line that no graph can hold and the remedy.
    """
    try:
        return _captured(request)
    except FxdpError as error:
        show_user_lines(error)
        raise error  # with the traceback as it is now


def _captured(request: Request) -> Captured:
    module, inputs, loss_fn, hint = request.module, request.inputs, request.loss_fn, request.hint
    _check_module_hooks(module)
    with compile_lock, unchanged(module), capture_patches(module, loss_fn):
        several = hint if hint is not None and hint > 1 else batch_hint(inputs.fixed_sizes)
        others = [(f"the input {name}", value) for name, value in inputs.python_leaves]
        outside = ExternalState(external_state(module, [("the loss function", loss_fn), *others]))
        attempt = CaptureAttempt(Tracer.of(request, outside), several)
        made = _capture_open(attempt) if inputs.open else _capture(attempt)
        attempt.failures.clear()  # errors hold frames, and these the attempt
        tracer = made.tracer
        found = replace(made.captured, strategy=", ".join(made.strategies), left=made.left)
        _log_strategy(found)
        record = tracer.program.record
        if record.seeded and graph_draws(found.gm.graph):
            raise seeding_error(*record.seeded[0])
        if request.full_batch_draws:
            found = _for_one(found, tracer) if hint == 1 else for_several(found)
    if isinstance(module, Guarded):
        found = module.with_guards(found, inputs)
    record = tracer.program.record
    written = tuple(outside.changed)
    precision = request.precision
    check_memory(
        module, record.changed, outside, lambda m: run_model(m, *inputs.copies(), loss_fn, precision)
    )
    warn_of_side_effects(record.beside)
    origin = request.origin or Origin.here(loss_fn)
    found = replace(found, layout_reads=record.layout_reads, origin=origin, model=type(module).__name__)
    words = tuple((outside.changed[place], word) for place, word in outside.words.items())
    return replace(
        found, read=outside.read, written=written, words=words, beside=record.beside,
        read_values=record.read_values,
    )  # fmt: skip


def _capture(attempt: CaptureAttempt) -> Made:
    """The capture by the first strategy that works.

    Raises
    ------
    CaptureError : none does.
    """
    try:
        return first_that_works(STRATEGIES, attempt)
    except NothingFitsError as none:
        every = attempt.tracer.request.strict
        raise _refusal(attempt, [one for one in none.left if one.tried or every]) from _cause(attempt)


def _capture_open(attempt: CaptureAttempt) -> Made:
    """The capture, with Python values that are no constants of it.

    Raises
    ------
    SpecializationError : they must be; whatever else it is that fails, fails or not without them.
    """
    inputs, program = attempt.tracer.request.inputs, attempt.tracer.program
    try:
        made = first_that_works(STRATEGIES, attempt)
    except (CaptureError, InputError, NothingFitsError) as error:
        record, cause = program.record, _cause(attempt) if isinstance(error, NothingFitsError) else error
        every = [*inputs.number_names, *(inputs.names[i] for i in inputs.unread)]
        raise SpecializationError(record.touched or deciding(cause, record.symbols) or every) from cause
    if made.tracer.program.record.touched:
        raise SpecializationError(made.tracer.program.record.touched)
    return made


def _for_one(found: Captured, tracer: Tracer) -> Captured:
    """The capture with its draws as those of a single sample."""
    if not graph_draws(found.gm.graph):
        return found
    raw = traced(lambda: trace_joint(tracer.export(1, symbolic=False), tracer.request.joint))
    if isinstance(raw, Exception):
        raise capture_error(raw) from raw
    return for_one(found, annotate_joint(raw, Sizes()).gm.graph)


def _cause(attempt: CaptureAttempt) -> Exception:
    """The latest error with a place in the user's code, which a difference of static traces has not."""
    return next(error for error in reversed(attempt.errors) if not isinstance(error, StaticMismatchError))


def _refusal(attempt: CaptureAttempt, left: Sequence[LeftStrategy]) -> CaptureError:
    """The error where no strategy works: line, cause and remedy, then why each strategy was left."""
    error, cause, probe = attempt.error, _cause(attempt), attempt.probe
    if isinstance(error, StaticMismatchError):
        return _with_tried(capture_error(cause, str(error), probe.reads), left)
    if attempt.asks_for_data:
        return _with_tried(capture_error(cause, reads=probe.reads), left)
    if probe.error is not None and not probe.reads:
        return eager_error(probe.error)
    if fixed := fixed_rows_error(cause, attempt.tracer.request.inputs.axes.rows):
        return _with_tried(fixed, left)
    return _with_tried(capture_error(cause, reads=probe.reads, only_at=_only_at(attempt.tracer, probe)), left)


def _only_at(tracer: Tracer, found: EagerProbe) -> OnlyAt | None:
    """The given batch size, if the model runs at it but not with one sample less; of what multiples.

    A ragged batch is not tried: its samples are not known yet, so none can be left out.
    """
    inputs = tracer.request.inputs
    given = inputs.batch
    if not found.runs or given is None or given < 2 or inputs.axes.names:
        return None

    def runs_at(size: int) -> bool:
        pairs = zip(inputs.tensors, inputs.batch_dims, strict=True)
        return tracer.eager_probe([t if d is None else t.narrow(d, 0, size) for t, d in pairs]).runs

    if runs_at(given - 1):
        return None
    parts = (n for n in range(2, given // 2 + 1) if given % n == 0)
    return OnlyAt(given, next((n for n in parts if runs_at(n) and runs_at(given - n)), None))


def _check_module_hooks(module: nn.Module) -> None:
    """Raise on backward hooks of modules, which no graph of tensors can hold.

    Raises
    ------
    CaptureError : modules with backward hooks, all of them.
    """
    if not torch.is_grad_enabled():
        return
    found = [
        f"{name or 'the model'} ({type(child).__name__})"
        for name, child in module.named_modules()
        if child._backward_hooks or child._backward_pre_hooks
    ]
    if found:
        raise CaptureError(
            f"hooks on the backward of modules are not supported; registered on {', '.join(found)}. Remove "
            "them, or hook the tensor itself in the forward (tensor.register_hook with a hook that returns "
            "the gradient)"
        )


def _log_strategy(found: Captured) -> None:
    """Log why a capture is not by the first strategy."""
    if found.left:
        _log.info("%s", "\n".join(found.reasons()))


def _with_tried(refusal: CaptureError, left: Sequence[LeftStrategy]) -> CaptureError:
    """Add the reasons why strategies were left, if there are several and the model is at fault."""
    if len(left) < 2 or isinstance(refusal, TorchMismatchError):
        return refusal
    lines = "".join(f"\n  {one}" for one in left)
    return type(refusal)(f"{refusal}\ntried in this order:{lines}")
