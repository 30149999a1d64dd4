"""Stop all ranks within seconds if one raises or dies, and give every rank the cause.

    with guard(joined):            around each compiled forward and backward
        ...

    this rank raises               the error goes to all ranks on the control channel, then the groups are
                                   cut; the exception itself propagates unchanged
    another rank raises or dies    a collective that waits for that rank breaks, and the guard turns torch's
                                   "connection closed" into RankFailedError with that rank's message. Python
                                   code (compiling a model) is interrupted by the watch, and raises this error

`ranks/hooks.py` sends an error between two calls, in the user's own loop, to all ranks. Where these hooks
are not called (a child of multiprocessing), wrap the loop in `report_errors()`. If this rank cannot accept
an input, `refusing` tells all ranks before anything has begun: then only this call fails on all ranks, and
the next call works.
"""

from __future__ import annotations

import contextlib
import re
import socket
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from fxdp.errors import AgreementError, FxdpError, RankFailedError, StateError, add_note
from fxdp.ir.graph.user_lines import show_user_lines
from fxdp.ranks.comms import (
    Comms,
    Departure,
    DepartureKind,
    Interrupted,
    LateError,
    RefusedError,
    broadcast_everywhere,
    speaking_comms,
)
from fxdp.ranks.liveness.departure import TEXT_LIMIT
from fxdp.ranks.liveness.mixed_operands import explain_mixed_operands
from fxdp.ranks.process_mesh import ProcessMesh

_BROKEN = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out",
    "application timeout",
    "gloo/transport",
    "nccl",
    "aborted",
)
_LATE = "timed out waiting"
_REFUSED = "__fxdp_refused__"  # set on an error that all ranks know, or have raised as well
_TOLD = "__fxdp_told__"  # set on an error that has been written to the store
_WHO = "(at fault:"
_OF_TORCH = re.compile(r"gloo/|nccl|c10d", re.IGNORECASE)
_FRAMES = 6


class guard:  # noqa: N801  (reads as a statement: with guard(joined))
    """Context manager around one compiled call that reports errors to and from all ranks.

    `backward_of` is the number of the call to which the enclosed backward belongs, if to be logged.

    Raises
    ------
    RankFailedError : a rank failed or died, now or earlier.
    StateError : the process group was destroyed.
    """

    def __init__(self, process_mesh: ProcessMesh, backward_of: int = 0) -> None:
        self._process_mesh = process_mesh
        self._comms = process_mesh.comms
        self._backward_of = backward_of
        self._order = 0

    def __enter__(self) -> None:
        if self._comms is None:
            return
        self._process_mesh.check_alive()
        if not self._comms.iteration.acquire(blocking=False):
            raise StateError(
                "another thread of this process is in a compiled forward or backward; expected one thread at "
                "a time: ranks meet by the order of what they do, and threads have none"
            )
        try:
            self._comms.liveness.caller.enter()
            self._order = self._comms.sequence_log.order
            if self._backward_of:
                self._comms.sequence_log.begin_backward(self._backward_of)
        except Interrupted as error:
            self._interrupted(self._comms, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        comms = self._comms
        try:
            if error is not None:
                show_user_lines(error)
            if comms is None:
                return
            comms.liveness.caller.leave()
            comms.iteration.release()
        except Interrupted as interrupted:  # raised by the watch in this very line
            assert comms is not None
            self._interrupted(comms, interrupted)
        if error is not None:
            if comms.sequence_log.order != self._order:
                _add_place(comms, error, "in")
            self._end(comms, error)
        elif comms.liveness.departure is not None:  # e.g. aborted NCCL kernels end without an error
            raise RankFailedError(comms.control.words(comms.liveness.departure))

    @staticmethod
    def _interrupted(comms: Comms, error: BaseException) -> NoReturn:
        """Leave for good, if the watch has interrupted this thread before or after the guarded call."""
        comms.liveness.caller.leave()
        with contextlib.suppress(RuntimeError):  # released already
            comms.iteration.release()
        _raise_cause(comms, error)

    @staticmethod
    def _end(comms: Comms, error: BaseException) -> None:
        """Stop this rank's connections after a fatal error; raise a more precise error if one is known."""
        if isinstance(error, AgreementError) or fails_this_call_alone(error):
            return
        live = comms.liveness
        if isinstance(error, RankFailedError):
            if _is_late(error.__cause__) and (words := _at_fault(comms, error.__cause__)):
                failure = RankFailedError(words)
                live.fail(words)
                raise failure from error
            cause = live.departure if isinstance(error, LateError) else live.cause()
            live.stop(cause or Departure(comms.rank, DepartureKind.FAILED, str(error)))
            return
        if isinstance(error, Interrupted) or (live.caller.interrupted and live.departure is not None):
            _raise_cause(comms, error)  # also for a different error that code has made of the interrupt
        if _is_broken_collective(error):
            failure = convert(comms, error)
            _add_place(comms, failure, "in")
            live.fail(str(failure))
            raise failure from error
        if live.departure is not None:
            add_note(error, f"(at about the same time, {comms.control.words(live.departure)})")
        live.fail(_describe(error))


def _raise_cause(comms: Comms, error: BaseException) -> NoReturn:
    """Raise the error that caused an interrupt, and close the connections."""
    live = comms.liveness
    departure = live.departure or live.cause() or Departure(comms.rank, DepartureKind.FAILED, str(error))
    failure = RankFailedError(comms.control.words(departure))
    for meta in getattr(error, "__notes__", ()):
        add_note(failure, meta)
    live.stop(departure)
    raise failure from error


def convert(comms: Comms, error: BaseException) -> RankFailedError:
    """Return the error to raise for a collective that broke with `error`, with the failed rank's message."""
    if words := _at_fault(comms, error):
        return RankFailedError(words)
    return RankFailedError(
        f"a collective on rank {comms.ranks[comms.rank]} failed, though all ranks seem to be alive: {error}\n"
        "expected all ranks to make the same calls in the same order (FXDP_TIMEOUT_S: how long to wait)"
    )


def _at_fault(comms: Comms, error: BaseException | None) -> str | None:
    """Return a message on the rank at fault for a broken collective; None if no rank is known."""
    if _is_late(error):  # torch does not name the rank
        if late := comms.liveness.late():
            return (
                f"{late}\nexpected all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need "
                f"longer)\ntorch: {error}"
            )
        if comms.liveness.departure is None and len(comms.ranks) == 2:  # both wait, and not for each other
            return (
                f"rank {comms.control.names[1 - comms.rank]} did not come to a collective in time, though "
                "its process is alive; expected all ranks to make the same calls (set FXDP_TIMEOUT_S if one "
                f"may need longer)\ntorch: {error}"
            )
        return comms.control.words(comms.liveness.departure) if comms.liveness.departure is not None else None
    cause = comms.liveness.cause()
    return None if cause is None else comms.control.words(cause)


@contextlib.contextmanager
def refusing(process_mesh: ProcessMesh) -> Iterator[None]:
    """Context manager around the checks before a call's exchange: an error fails this call on all ranks.

    The next call works. Use this only where all ranks wait for this one in `Agreement.exchange` next.
    """
    try:
        yield
    except Exception as error:
        refuse(process_mesh, error)
        raise


def refuse(process_mesh: ProcessMesh, error: Exception) -> None:
    """Refuse this call on all ranks, which wait for this rank in `Agreement.exchange` next."""
    if process_mesh.comms is not None and process_mesh.comms.liveness.departure is None:
        _add_place(process_mesh.comms, error, "in")
        process_mesh.comms.control.refuse(_describe(error))
        with contextlib.suppress(AttributeError):
            setattr(error, _REFUSED, True)


def fails_this_call_alone(error: BaseException) -> bool:
    """Return whether an error left a call on all ranks alike, and the next call works."""
    return isinstance(error, RefusedError) or bool(getattr(error, _REFUSED, False))


def everywhere(error: FxdpError) -> FxdpError:
    """Mark an error that each rank raises from data known to all ranks, so that only this call fails."""
    setattr(error, _REFUSED, True)
    return error


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Send any exception that leaves the block to all ranks; the exception propagates unchanged."""
    try:
        yield
    except BaseException as error:
        broadcast_all(error)
        raise


def _describe(error: BaseException) -> str:
    """Return an error as text for another rank: type, message, and the innermost frames."""
    message = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    lines = [f'  File "{item.filename}", line {item.lineno}, in {item.name}' for item in frames]
    return "\n".join([message, *lines])[:TEXT_LIMIT]


def broadcast_all(error: BaseException) -> None:
    """Tell the ranks of all meshes, and ranks that wait at start-up, why this rank ends."""
    _explain(error)
    explain_mixed_operands(error)
    for comms in speaking_comms():
        if comms.liveness.departure is None:  # meshes that failed earlier do not know where this rank is now
            _add_place(comms, error, "after")
        comms.liveness.fail(_describe(error))
    if isinstance(error, RankFailedError) or getattr(error, _TOLD, False):
        return
    with contextlib.suppress(AttributeError):
        setattr(error, _TOLD, True)
    broadcast_everywhere(_describe(error))


def _explain(error: BaseException) -> None:
    """Add a note with the rank at fault to an error of a user's collective, which torch seldom names."""
    told = "".join(getattr(error, "__notes__", ()))
    own = isinstance(error, (RankFailedError, AgreementError)) or _WHO in told
    if own or not (_is_broken_collective(error) and _OF_TORCH.search(str(error))):
        return
    for comms in speaking_comms():
        if words := _at_fault(comms, error):
            add_note(error, f"{_WHO} {words})")
            return


def _add_place(comms: Comms, error: BaseException, when: str) -> None:
    """Add a note with this rank and the current call or backward to an error."""
    here, log = comms.ranks[comms.rank], comms.sequence_log
    words = f", {when} {log.words(log.now)}" if log.now else ""
    if not any(known.startswith("(on rank ") for known in getattr(error, "__notes__", ())):
        add_note(error, f"(on rank {here}, host {socket.gethostname()}{words})")


def _is_late(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and _LATE in str(error).lower()


def _is_broken_collective(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _BROKEN)
