"""`CaptureAttempt`: a capture under way, with its tracer, what was tried, and what a run of the model shows.

    Request --> CaptureAttempt(Tracer) -- strategies, one after another --> Made, or NothingFitsError

Strategies (`capture_strategies.py`) read an attempt to say whether they apply, and trace by its `Tracer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from fxdp.capture.captured import Captured, LeftStrategy
from fxdp.capture.export.exported import Exported, export, static_hints
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.inputs import samples
from fxdp.capture.patches.module_state import Number, numbers_of
from fxdp.capture.patches.outside_state import ExternalState
from fxdp.capture.patches.python_draws import UncheckedDrawError
from fxdp.capture.patches.unbacked_hints import HintedNumber, decided_by_size
from fxdp.capture.python_values import SpecializationError
from fxdp.capture.refusals.diagnose import is_data_dependent
from fxdp.capture.refusals.eager_probe import EagerProbe, eager_probe
from fxdp.capture.request import Request
from fxdp.errors import CaptureError, InputError


@dataclass(frozen=True)
class Tracer:
    """A request, the program that is traced for it, and what its code finds outside of it."""

    request: Request
    program: FlatModule
    outside: ExternalState

    @classmethod
    def of(
        cls,
        request: Request,
        outside: ExternalState,
        numbers: Mapping[str, Number] | None = None,
        hints: Mapping[int, Sequence[HintedNumber]] | None = None,
    ) -> Tracer:
        """Make the tracer of a request, with these buffers as numbers and told these integers of its data."""
        module, inputs, loss_fn = request.module, request.inputs, request.loss_fn
        program = FlatModule(module, inputs, loss_fn, numbers, request.precision, request.branches, hints)
        return cls(request, program, outside)

    def on(self, branches: tuple[bool, ...]) -> Tracer:
        """The tracer of a program that goes these ways."""
        request = replace(self.request, branches=branches)
        return Tracer.of(request, self.outside, self.program.numbers, self.program.told)

    def export(self, batch: int, *, symbolic: bool) -> Exported:
        """The forward graph at this batch size, with it or with a symbol as its batch size."""
        try:
            return self._export(batch, symbolic)
        except UncheckedDrawError:
            self.program.watches_draws = True
            return self._export(batch, symbolic)

    def _export(self, batch: int, symbolic: bool) -> Exported:
        dims = self.request.inputs.batch_dims
        with self.outside.put_back():
            return export(self.program, dims, batch, symbolic=symbolic, dynamic=self.request.dynamic)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes of static traces, in order: with that of the call, if a capture asks for it."""
        sizes, hint = static_hints(self.request.inputs.fixed_sizes), self.request.hint
        return tuple(sorted({*sizes, hint})) if hint is not None and hint > 1 else sizes

    def static_exports(self, batches: Sequence[int]) -> Iterator[Exported]:
        """The forward graphs at these batch sizes, each made when it is asked for."""
        return (self.export(batch, symbolic=False) for batch in batches)

    def eager_probe(self, tensors: Sequence[Tensor] | None = None) -> EagerProbe:
        """Run the model on the request's inputs or the given ones, and record what it does."""
        asked = self.request
        with self.outside.put_back():
            return eager_probe(asked.module, asked.inputs, asked.loss_fn, tensors, asked.precision)


@dataclass(frozen=True)
class Made:
    """A capture, the tracer of its program, and how it came about."""

    captured: Captured
    tracer: Tracer
    strategies: tuple[str, ...] = ()
    """The strategy that made it; of one that changes the program first, then how that was traced."""
    left: tuple[LeftStrategy, ...] = ()
    """The strategies before it."""


@dataclass(frozen=True)
class Failure:
    """An exception that stopped a strategy."""

    strategy: str
    error: Exception
    reported: bool
    """Whether the error of the capture reports it if nothing works; if not, it reports the one before."""


_T = TypeVar("_T")


def traced(trace: Callable[[], _T]) -> _T | Exception:
    """Run a trace and return its result, or the exception that stopped it.

    Raises
    ------
    CaptureError, InputError, SpecializationError : the trace was refused, for a reason in the user's words.
    """
    try:
        return trace()
    except (CaptureError, InputError, SpecializationError):
        raise
    except Exception as error:  # user's code may raise anything, and torch does while it traces
        return error


class NothingFitsError(Exception):
    """No strategy has captured the model; `left` says of each why it was left."""

    def __init__(self, left: Iterable[LeftStrategy]) -> None:
        self.left = tuple(left)
        super().__init__("; ".join(map(str, self.left)))


@dataclass
class CaptureAttempt:
    """A tracer, and what has failed on it so far."""

    tracer: Tracer
    hint: int
    """The batch size of a symbolic trace."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def errors(self) -> list[Exception]:
        """The errors that may be reported, in order."""
        return [failure.error for failure in self.failures if failure.reported]

    @property
    def error(self) -> Exception | None:
        """The latest of these; None before the first."""
        return next(reversed(self.errors), None)

    def has_failed(self, strategy: str) -> bool:
        """Whether a strategy was tried and failed."""
        return any(failure.strategy == strategy for failure in self.failures)

    @property
    def asks_for_data(self) -> bool:
        """Whether the latest error is that the code asks for the value of a tensor."""
        return self.error is not None and is_data_dependent(self.error)

    @property
    def other_branches(self) -> tuple[bool, ...] | None:
        """The ways of the code with the other guess at its last branch; None where none was guessed."""
        return self.tracer.program.record.other_guess

    @cached_property
    def probe(self) -> EagerProbe:
        """A run of the model on the request's inputs."""
        return self.tracer.eager_probe()

    @cached_property
    def numbers(self) -> dict[str, Number]:
        """The small buffers whose values the code reads, if it writes none of them."""
        return numbers_of(self.tracer.request.module, self.probe.read, self.probe.written)

    @cached_property
    def hints(self) -> dict[int, tuple[HintedNumber, ...]]:
        """The integers of its data that the code reads at the sizes of static traces, if the size decides."""
        inputs = self.tracer.request.inputs
        if not self.probe.numbers or not inputs.batch or inputs.axes.names:
            return {}
        runs = {}
        for size in self.tracer.batches:
            found = self.tracer.eager_probe(samples(inputs, size))
            if not found.runs:
                return {}
            runs[size] = found.numbers
        return decided_by_size(runs)

    def changed(
        self,
        numbers: Mapping[str, Number] | None = None,
        hints: Mapping[int, Sequence[HintedNumber]] | None = None,
    ) -> CaptureAttempt:
        """An attempt at the program with these buffers as numbers, or told these integers."""
        return CaptureAttempt(Tracer.of(self.tracer.request, self.tracer.outside, numbers, hints), self.hint)
