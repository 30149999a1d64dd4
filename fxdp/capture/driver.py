"""Capture: symbolic first; where the model fixes its batch size, fitted from several static traces."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from fxdp.capture.captured import Captured
from fxdp.capture.export.exported import Exported, batch_hint, export, static_hints
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.external_places import ReadState
from fxdp.capture.external_state import external_state
from fxdp.capture.inputs import run_model, samples
from fxdp.capture.joint.annotate_joint import annotate_joint
from fxdp.capture.joint.batch_size_one_rng import for_one, for_several
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.raw_joint import JointOptions, trace_joint
from fxdp.capture.joint.static import StaticMismatchError, fitted_joint
from fxdp.capture.joint.symbolic_joint import joint_of_forward
from fxdp.capture.locations import Origin
from fxdp.capture.patches.autograd_functions import check_module_hooks
from fxdp.capture.patches.module_state import Number, WrittenError, numbers_of, unchanged
from fxdp.capture.patches.outside_state import ExternalState
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.capture.patches.random_numbers import seeding_error
from fxdp.capture.patches.unbacked_hints import HintedNumber, decided_by_size
from fxdp.capture.python_values import SpecializationError, deciding
from fxdp.capture.refusals.diagnose import OnlyAt, capture_error, eager_error, is_data_dependent
from fxdp.capture.refusals.eager_probe import EagerProbe, eager_probe
from fxdp.capture.refusals.stateful import check_memory
from fxdp.capture.request import Guarded, Request
from fxdp.errors import CaptureError, InputError
from fxdp.ir.draws import graph_draws
from fxdp.torch_compat import compile_lock

_log = logging.getLogger("fxdp")


def capture_request(request: Request) -> Captured:
    """The module's forward and backward as one graph in global shapes.

    Raises
    ------
    CaptureError : the model cannot be captured, with the line that no graph can hold and the remedy.
    """
    module, inputs, loss_fn, hint = request.module, request.inputs, request.loss_fn, request.hint
    check_module_hooks(module)
    with compile_lock, unchanged(module), capture_patches(module, loss_fn):
        several = hint if hint is not None and hint > 1 else batch_hint(inputs.tensors, inputs.batch_dims)
        outside = ExternalState(_read_by(request))
        first = _Tracer(request, _program(request), outside)
        if inputs.open:
            found, tracer = _capture_open(first, several)
        else:
            found, tracer = _capture(first, several)
        record = tracer.program.record
        if record.seeded and graph_draws(found.gm.graph):
            raise seeding_error(*record.seeded[0])
        if request.full_batch_draws:
            found = _for_one(found, tracer) if hint == 1 else for_several(found)
    if isinstance(module, Guarded):
        found = module.with_guards(found, inputs)
    record = tracer.program.record
    written = tuple(outside.changed)
    check_memory(module, record.changed, outside, lambda twin: _run(twin, request))
    origin = request.origin or Origin.here(loss_fn)
    found = replace(found, layout_reads=record.layout_reads, origin=origin, model=type(module).__name__)
    words = tuple((outside.changed[place], word) for place, word in outside.words.items())
    return replace(found, read=outside.read, written=written, words=words, read_values=record.read_values)


def _read_by(request: Request) -> ReadState:
    inputs = request.inputs
    given = [(f"the input {name}", x) for name, x in zip(inputs.names, inputs.leaves, strict=True)]
    others = [given_one for given_one in given if not isinstance(given_one[1], Tensor)]
    return external_state(request.module, [("the loss function", request.loss_fn), *others])


def _run(twin: nn.Module, request: Request) -> Any:
    args, kwargs = request.inputs.copies()
    return run_model(twin, args, kwargs, request.loss_fn, request.precision)


@dataclass(frozen=True)
class _Tracer:
    """A request, the program that is traced for it, and what its code finds outside of it."""

    request: Request
    program: FlatModule
    outside: ExternalState

    def export(self, hint: int, *, symbolic: bool) -> Exported:
        """The forward graph at a batch of `hint`, with it or with a symbol as its batch size."""
        dims = self.request.inputs.batch_dims
        with self.outside.put_back():
            return export(self.program, dims, hint, symbolic=symbolic, dynamic=self.request.dynamic)

    def on(self, branches: tuple[bool, ...]) -> _Tracer:
        """The same with a program that goes these ways."""
        request = replace(self.request, branches=branches)
        return _Tracer(request, _program(request, self.program.numbers, self.program.told), self.outside)

    def eager_probe(self, tensors: Sequence[Tensor] | None = None) -> EagerProbe:
        """What a run of the model shows, on these inputs or the given ones."""
        asked = self.request
        with self.outside.put_back():
            return eager_probe(asked.module, asked.inputs, asked.loss_fn, tensors, asked.precision)


def _program(
    request: Request,
    numbers: Mapping[str, Number] | None = None,
    told: Mapping[int, Sequence[HintedNumber]] | None = None,
) -> FlatModule:
    """What is traced for a request, with these buffers as numbers, and told what runs read of their data."""
    module, inputs, loss_fn = request.module, request.inputs, request.loss_fn
    return FlatModule(module, inputs, loss_fn, numbers, request.precision, request.branches, told)


def _capture(tracer: _Tracer, hint: int) -> tuple[Captured, _Tracer]:
    """The capture, and what was traced for it."""
    try:
        return joint_of_forward(tracer.export(hint, symbolic=True), tracer.request.joint), tracer
    except (CaptureError, InputError, SpecializationError):
        raise
    except Exception as error:
        if tracer.request.inputs.open and is_data_dependent(error):
            raise
        other = tracer.program.record.other_guess
        if other is not None and not is_data_dependent(error):
            return _capture(tracer.on(other), hint)
        if is_data_dependent(error):
            return _with_numbers(error, tracer, hint, tracer.eager_probe())
        return _fall_back(error, tracer, hint)


def _capture_open(tracer: _Tracer, hint: int) -> tuple[Captured, _Tracer]:
    """The capture, with Python values that are no constants of it, and what was traced for it.

    Raises
    ------
    SpecializationError : they must be; whatever else it is that fails, fails or not without them.
    """
    try:
        found, last = _capture(tracer, hint)
    except SpecializationError:
        raise
    except Exception as error:
        inputs, record = tracer.request.inputs, tracer.program.record
        every = [*inputs.number_names, *(inputs.names[i] for i in inputs.unread)]
        raise SpecializationError(record.touched or deciding(error, record.symbols) or every) from error
    if last.program.numbers or last.program.told:  # constants, which a number may have been the reason for
        raise SpecializationError([*tracer.request.inputs.number_names])
    if last.program.record.touched:
        raise SpecializationError(last.program.record.touched)
    return found, last


def _with_numbers(
    error: Exception, tracer: _Tracer, hint: int, found: EagerProbe
) -> tuple[Captured, _Tracer]:
    """Capture once more with small buffers as numbers: it may be their values that the code reads."""
    request = tracer.request
    numbers = {} if tracer.program.numbers else numbers_of(request.module, found.read, found.written)
    if numbers:
        program = _program(request, numbers)
        with contextlib.suppress(CaptureError, WrittenError):
            captured, tracer = _capture(replace(tracer, program=program), hint)
            return replace(captured, numbers=tuple(numbers)), tracer
    if (made := _with_told(error, tracer, hint, found)) is not None:
        return made
    raise capture_error(error, reads=found.reads) from error


def _with_told(
    error: Exception, tracer: _Tracer, hint: int, found: EagerProbe
) -> tuple[Captured, _Tracer] | None:
    """Capture once more, with the code told what it reads of its data, as far as sizes decide it."""
    if not found.numbers or tracer.program.told:
        return None
    told = _told(tracer)
    if told:
        with contextlib.suppress(CaptureError):
            return _fall_back(error, replace(tracer, program=_program(tracer.request, told=told)), hint)
    return None


def _told(tracer: _Tracer) -> dict[int, tuple[HintedNumber, ...]]:
    """What the model reads of its data at the batch sizes of static traces, as far as these decide it."""
    inputs = tracer.request.inputs
    runs = {}
    for size in static_hints(inputs.tensors, inputs.batch_dims):
        found = tracer.eager_probe(samples(inputs, size)) if inputs.batch else EagerProbe((), runs=False)
        if not found.runs:
            return {}
        runs[size] = found.numbers
    return decided_by_size(runs)


def _for_one(found: Captured, tracer: _Tracer) -> Captured:
    """The capture with its draws as those of a single sample."""
    if not graph_draws(found.gm.graph):
        return found
    try:
        raw = trace_joint(tracer.export(1, symbolic=False), tracer.request.joint)
    except (CaptureError, InputError):
        raise
    except Exception as error:
        raise capture_error(error) from error
    return for_one(found, annotate_joint(raw, Sizes()).gm.graph)


def _fall_back(error: Exception, tracer: _Tracer, hint: int) -> tuple[Captured, _Tracer]:
    """Fit the graph from static traces; if these fail too, report what is nearest to the user's code."""
    try:
        return _fitted(tracer), tracer
    except (CaptureError, InputError):
        raise
    except StaticMismatchError as mismatch:
        found = tracer.eager_probe()
        if (made := _with_told(mismatch, tracer, hint, found)) is not None:
            return made
        raise capture_error(error, str(mismatch), found.reads) from error
    except Exception as second:
        found = tracer.eager_probe()
        if is_data_dependent(second):
            return _with_numbers(second, tracer, hint, found)
        if found.error is not None and not found.reads:
            raise eager_error(found.error) from found.error
        raise capture_error(second, reads=found.reads, only_at=_only_at(tracer, found)) from second


def _fitted(tracer: _Tracer) -> Captured:
    """The graph of static traces: as they are, or with the turns of loops over samples as ops on all.

    Raises
    ------
    StaticMismatchError : they do not fit together.
    """
    inputs, options = tracer.request.inputs, tracer.request.joint
    batches = static_hints(inputs.tensors, inputs.batch_dims)

    def exports(sizes: Sequence[int]) -> Iterator[Exported]:
        return (tracer.export(size, symbolic=False) for size in sizes)

    first = list(exports(batches[:2]))
    every = chain(first, exports(batches[2:]))
    if len({len(one.gm.graph.nodes) for one in first}) > 1:  # as loops over the samples make them
        found = _with_loops(batches, every, options)
        return fitted_joint(batches, exports(batches), options) if found is None else found
    try:
        return fitted_joint(batches, every, options)
    except StaticMismatchError:
        if (found := _with_loops(batches, exports(batches), options)) is not None:
            return found
        raise


def _with_loops(
    batches: Sequence[int], exports: Iterable[Exported], options: JointOptions
) -> Captured | None:
    """The graph with the turns of loops as ops on all samples; None where there is none."""
    try:
        return fitted_joint(batches, exports, options, loops=True)
    except Exception as error:  # where turns differ, how they do tells a user less
        _log.debug("loops over the samples are no ops on all of them: %r", error)
    return None


def _only_at(tracer: _Tracer, found: EagerProbe) -> OnlyAt | None:
    """The given batch size, if the model runs at it but not with one sample less; of what multiples."""
    inputs = tracer.request.inputs
    given = inputs.batch
    if not found.runs or given is None or given < 2:
        return None

    def runs_at(size: int) -> bool:
        pairs = zip(inputs.tensors, inputs.batch_dims, strict=True)
        return tracer.eager_probe([t if d is None else t.narrow(d, 0, size) for t, d in pairs]).runs

    if runs_at(given - 1):
        return None
    parts = (n for n in range(2, given // 2 + 1) if given % n == 0)
    return OnlyAt(given, next((n for n in parts if runs_at(n) and runs_at(given - n)), None))
