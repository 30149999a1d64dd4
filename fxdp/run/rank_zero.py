"""Let rank 0 alone do what reaches outside of the script, and give all ranks the outcome.

    the script, on all ranks       rank 0                     other ranks
    input("name? ")                reads the terminal, sends  wait for the text
    subprocess.run(command)        runs it, sends             wait for output and return code

The outcome is a value of plain types or an error, which is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fxdp.errors import AgreementError
from fxdp.ranks.agreement import gather_objects
from fxdp.run.session import Session
from fxdp.settings import Settings

_WAITS = "waits"
_ERRORS = {kind.__name__: kind for kind in (EOFError, ValueError, TypeError, RuntimeError)}
"""Errors that all ranks raise as rank 0 did; others become RuntimeError."""


class RankZero:
    """Calls that rank 0 does for all."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.inside = False
        """Whether this rank is rank 0 and in such a call."""

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0."""
        return self._session.ranks.rank == 0

    def can_share(self) -> bool:
        """Return whether all ranks come to the current call: the main thread of the script's own process.

        Loading a rank's own samples is no such place, and neither is a call inside of a shared one.
        """
        session = self._session
        if self.inside or session.loads or session.is_child:
            return False
        return threading.current_thread() is threading.main_thread()

    def call(self, what: str, act: Callable[[], Any]) -> Any:
        """Return what `act` returns on rank 0, or raise what it raises there; a collective call.

        Parameters
        ----------
        what : the call with its line, which must be equal on all ranks.

        Raises
        ------
        AgreementError : ranks are in different calls.
        """
        ranks = self._session.ranks
        if ranks.world == 1:
            return act()
        outcome = self._done(act) if self.is_rank_0 else None
        told = self._told(what, outcome)
        while told[0] == _WAITS:
            told = self._told(what, outcome)
        return _value(told)

    def meet(self, what: str) -> None:
        """Wait until all ranks are in the same call, if all come there; a collective call then."""
        if self.can_share():
            self.call(what, lambda: None)

    def _done(self, act: Callable[[], Any]) -> tuple[Any, ...]:
        self.inside = True
        try:
            with self._others_wait():
                return "value", act()
        except Exception as error:
            return _described(error)
        finally:
            self.inside = False

    def _told(self, what: str, outcome: tuple[Any, ...] | None) -> tuple[Any, ...]:
        rows = gather_objects(self._session.ranks.process_mesh, (what, outcome))
        calls = [row[0] for row in rows]
        if any(call not in (what, _WAITS) for call in calls):
            raise AgreementError(f"ranks are in other calls: {calls}; expected one, as on one device")
        return tuple(rows[0][1])

    @contextlib.contextmanager
    def _others_wait(self) -> Iterator[None]:
        """Let the other ranks wait for as long as the block takes, beyond their usual limit."""
        ended = threading.Event()
        pause = Settings.from_environment().timeout_s / 4

        def tell() -> None:
            while not ended.wait(pause):
                gather_objects(self._session.ranks.process_mesh, (_WAITS, (_WAITS,)))

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()


def _described(error: Exception) -> tuple[Any, ...]:
    """Return an error as plain values."""
    if isinstance(error, subprocess.TimeoutExpired):
        return "timeout", error.timeout, error.output, error.stderr
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename
        return "system", error.errno, error.strerror, name if isinstance(name, (str, bytes)) else None
    kind = type(error).__name__
    return ("error", kind, str(error)) if kind in _ERRORS else ("error", "RuntimeError", repr(error))


def _value(told: tuple[Any, ...]) -> Any:
    kind, *values = told
    if kind == "value":
        return values[0]
    if kind == "timeout":
        timeout, output, errors = values
        raise subprocess.TimeoutExpired("the command", timeout, output, errors)
    if kind == "system":
        raise OSError(*values)
    name, text = values
    raise _ERRORS[name](text)
