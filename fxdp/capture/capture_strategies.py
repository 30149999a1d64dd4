"""The ways to capture a model, in the order in which they are tried.

    symbolic                 one trace with a symbol as batch size
    other branch             the same after another guess at a branch on a flag of the batch
    static traces            the graphs of several batch sizes, with a formula for what differs
    merged loops             the same where loops make them longer: their iterations as one op on all samples
    uneven static traces     the same where their joint graphs are as long all the same
    buffers as numbers       any of these, with the values of small buffers that the code reads as constants
    hinted numbers           static traces, told which integers of the data the code reads at each batch size

The first one that works is taken, and the capture says which it was. Why each was left is kept: it stands in
the plan, and in the error where none works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fxdp.capture.attempt import CaptureAttempt, Failure, Made, NothingFitsError, Tracer, traced
from fxdp.capture.captured import LeftStrategy
from fxdp.capture.export.dead_rng_ops import join_unread_draws
from fxdp.capture.export.exported import Exported
from fxdp.capture.export.needless_writes import drop_needless_writes
from fxdp.capture.joint.other_sizes import ForwardOps, conditions_of, ops_of
from fxdp.capture.joint.static import StaticMismatchError, fitted_joint, merge_loops
from fxdp.capture.joint.symbolic_joint import joint_of_forward
from fxdp.capture.patches.patch_tables import python_semantics
from fxdp.capture.refusals.diagnose import reason_of
from fxdp.errors import CaptureError


class _UnevenTracesError(StaticMismatchError):
    """Static traces of two batch sizes have other numbers of operations, as loops over samples make them."""

    def __init__(self, batches: Sequence[int], traces: Sequence[Exported]) -> None:
        self.traces = tuple(traces)
        counts = (len(trace.gm.graph.nodes) for trace in traces)
        listed = ", ".join(f"{count} at {batch}" for count, batch in zip(counts, batches, strict=True))
        super().__init__(f"the number of operations depends on the batch size ({listed})")


@dataclass(frozen=True)
class Strategy:
    """A way to capture a model."""

    name: str
    when: str
    """The code that it is for, in words."""
    applies: Callable[[CaptureAttempt], bool]
    """Whether to try it, by what failed before and what a run of the model shows."""
    run: Callable[[CaptureAttempt], Made]
    """Capture; raises what stops it."""
    reported: bool = True
    """Whether the error of the capture reports its failure if nothing works, and a refusal ends the capture.
    An attempt at more than the user's own code tells a user less than the failure before it."""
    repeats: bool = False
    """Whether it is tried again for as long as it applies."""
    in_wing: bool = False
    """Whether it belongs to the wing `python`, without which it does not apply."""


def first_that_works(strategies: Sequence[Strategy], attempt: CaptureAttempt) -> Made:
    """Try strategies in order, as far as they apply.

    Raises
    ------
    InputError, SpecializationError, CaptureError : a trace was refused; no other strategy is tried.
    NothingFitsError : none works; what each failed with is in `attempt.failures`.
    """
    for index, strategy in enumerate(strategies):
        while _is_there(strategy) and strategy.applies(attempt):
            made = _run(strategy, attempt)
            if isinstance(made, Made):
                again = attempt.has_failed(strategy.name)
                before = strategies[: index + 1] if again else strategies[:index]
                left = (*_left(before, attempt), *_named(strategy, made.left))
                return replace(made, strategies=(strategy.name, *made.strategies), left=left)
            attempt.failures.append(Failure(strategy.name, made, strategy.reported))
            if not strategy.repeats:
                break
    raise NothingFitsError(_left(strategies, attempt))


def _is_there(strategy: Strategy) -> bool:
    return not strategy.in_wing or python_semantics.is_extended


def _run(strategy: Strategy, attempt: CaptureAttempt) -> Made | Exception:
    """Return what a strategy has made, or the exception that stopped it."""
    try:
        return traced(lambda: strategy.run(attempt))
    except CaptureError as refusal:
        if strategy.reported:
            raise
        return refusal


def _left(strategies: Sequence[Strategy], attempt: CaptureAttempt) -> list[LeftStrategy]:
    """Say why each of these was left; the errors, which hold what was traced, are not kept."""
    found = []
    for strategy in strategies:
        if not attempt.has_failed(strategy.name):
            found.append(LeftStrategy(strategy.name, strategy.when, tried=False))
        for error in (failure.error for failure in attempt.failures if failure.strategy == strategy.name):
            if isinstance(error, NothingFitsError):
                found += _named(strategy, error.left)
            else:
                found.append(LeftStrategy(strategy.name, reason_of(error), tried=True))
    return found


def _named(strategy: Strategy, left: Sequence[LeftStrategy]) -> list[LeftStrategy]:
    """Name the strategies by which the program of this one was traced."""
    return [replace(one, name=f"{strategy.name}, {one.name}") for one in left]


def _symbolic(attempt: CaptureAttempt) -> Made:
    tracer = attempt.tracer
    exported = tracer.export(attempt.hint, symbolic=True)
    return Made(joint_of_forward(exported, tracer.request.joint), tracer)


def _other_branch(attempt: CaptureAttempt) -> Made:
    branches = attempt.other_branches
    assert branches is not None
    attempt.tracer = attempt.tracer.on(branches)  # strategies after this one go that way, too
    return _symbolic(attempt)


def _static(attempt: CaptureAttempt) -> Made:
    tracer = attempt.tracer
    first = list(tracer.static_exports(tracer.batches[:2]))
    if len({len(one.gm.graph.nodes) for one in first}) > 1:
        raise _UnevenTracesError(tracer.batches[:2], first)
    return _fitted(attempt, first)


def _merged_loops(attempt: CaptureAttempt) -> Made:
    assert isinstance(attempt.error, _UnevenTracesError)
    return _fitted(attempt, attempt.error.traces, loops=True)


def _fitted(attempt: CaptureAttempt, first: Sequence[Exported] = (), *, loops: bool = False) -> Made:
    """Fit one graph to static traces of all sizes, the first of which may be there already."""
    tracer, forwards = attempt.tracer, list[ForwardOps]()
    # first: what the program records of the code is that of the last trace
    few = [_ops_of_few(tracer, size, loops) for size in range(1, tracer.batches[0])]

    def traces() -> Iterator[Exported]:
        rest = tracer.static_exports(tracer.batches[len(first) :])
        for batch, exported in zip(tracer.batches, chain(first, rest), strict=True):
            forwards.append(_ops(exported, batch, loops))
            yield exported

    found = fitted_joint(tracer.batches, traces(), tracer.request.joint)
    return Made(replace(found, conditions=conditions_of(tracer.batches, forwards, few)), tracer)


def _ops_of_few(tracer: Tracer, size: int, loops: bool) -> ForwardOps | None:
    """Return the ops of the forward at so few samples; None where the code cannot be traced there."""
    try:
        return _ops(tracer.export(size, symbolic=False), size, loops)
    except Exception:  # the user's code may raise anything, and capture refuse it
        return None


def _ops(exported: Exported, batch: int, loops: bool) -> ForwardOps:
    """Return the ops of a forward graph, after its loops over the samples have been merged."""
    if loops:
        join_unread_draws(exported.gm.graph)
        drop_needless_writes(exported.gm)
        merge_loops(exported.gm, batch)
    return ops_of(exported.gm)


def _numbers(attempt: CaptureAttempt) -> Made:
    numbers = attempt.numbers
    made = _on_changed_program(TRACES, attempt.changed(numbers=numbers))
    return replace(made, captured=replace(made.captured, numbers=tuple(numbers)))


def _hinted(attempt: CaptureAttempt) -> Made:
    made = _on_changed_program(STATIC_TRACES, attempt.changed(hints=attempt.hints))
    # what is read of a buffer is a hint, too: with another value there the model is captured anew
    numbers = attempt.numbers if attempt.asks_for_data else {}
    return replace(made, captured=replace(made.captured, numbers=tuple(numbers)))


def _on_changed_program(strategies: Sequence[Strategy], attempt: CaptureAttempt) -> Made:
    try:
        return first_that_works(strategies, attempt)
    finally:
        attempt.failures.clear()  # errors hold frames, and these the attempt


def _is_closed(attempt: CaptureAttempt) -> bool:
    """Whether all Python values of the call are constants: others may be what the code asks for."""
    return not attempt.tracer.request.inputs.open


def _is_uneven(attempt: CaptureAttempt) -> bool:
    """Whether static traces differ in length."""
    return isinstance(attempt.error, _UnevenTracesError)


def _may_be_hinted(attempt: CaptureAttempt) -> bool:
    """Whether the code asks for data, or static traces differ, and a run reads integers that sizes decide."""
    stopped = attempt.asks_for_data or isinstance(attempt.error, StaticMismatchError)
    return stopped and _is_closed(attempt) and bool(attempt.hints)


STATIC_TRACES: tuple[Strategy, ...] = (
    Strategy(
        "static traces",
        "code that takes the batch size for a Python constant",
        lambda attempt: not attempt.asks_for_data and not attempt.tracer.request.inputs.axes.names,
        _static,
    ),
    Strategy(
        "merged loops",
        "loops over the samples, by which static traces differ in length",
        _is_uneven,
        _merged_loops,
        reported=False,
        in_wing=True,
    ),
    Strategy(
        "uneven static traces",
        "static traces that differ in length by ops that their joint graphs do not have",
        _is_uneven,
        _fitted,
    ),
)
"""Ways to trace a program at several batch sizes."""

TRACES: tuple[Strategy, ...] = (
    Strategy("symbolic", "any code", lambda _: True, _symbolic),
    Strategy(
        "other branch",
        "code that fails after a branch on a flag of the batch, whose way was a guess",
        lambda attempt: attempt.other_branches is not None and not attempt.asks_for_data,
        _other_branch,
        repeats=True,
        in_wing=True,
    ),
    *STATIC_TRACES,
)
"""All ways to trace a program."""

STRATEGIES: tuple[Strategy, ...] = (
    *TRACES,
    Strategy(
        "buffers as numbers",
        "code that reads the values of small buffers, which it does not write",
        lambda attempt: attempt.asks_for_data and _is_closed(attempt) and bool(attempt.numbers),
        _numbers,
        reported=False,
        in_wing=True,
    ),
    Strategy(
        "hinted numbers",
        "code that reads integers of its data which the batch size decides",
        _may_be_hinted,
        _hinted,
        reported=False,
        in_wing=True,
    ),
)
"""All strategies, in the order in which they are tried."""
