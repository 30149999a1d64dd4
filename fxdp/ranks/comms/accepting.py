"""Connect to a set of ranks: call some and accept calls of others, all at the same time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterable

from fxdp.errors import MeshError, RankFailedError
from fxdp.ranks.comms.addresses import Addresses
from fxdp.ranks.comms.descriptors import as_limit
from fxdp.ranks.comms.frames import NO_SIGNAL
from fxdp.ranks.comms.handshake import Handshake, StrangerError, hello, welcome
from fxdp.ranks.liveness.departure import Departure, DepartureKind

_SLEEP_MS = 100
_AGAIN_S = 0.2  # before the next attempt to call
_UNREACHABLE_S = 5.0  # how long a rank may be unreachable after publishing an address
_PROBE_S = 1.0  # interval between checks that missing ranks still listen
_STRANGERS = 64  # most callers in a handshake: beyond, the oldest is dropped, and calls again
_HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Rendezvousing:
    """The procedure by which one rank gets all connections.

    One loop with one deadline serves the listener, all callers without a complete handshake, and all own
    calls, so a stranger delays no rank. Every half second, less often with many ranks, the loop checks for
    broadcast failures, for connections that have ended, and for ranks that published an address and are
    gone.

    Parameters
    ----------
    addresses : addresses of all ranks, with the deadline.
    rank : this rank.
    calls : the planes and ranks to call, with known addresses.
    answers : the planes and ranks that will call.
    look : called at intervals; may raise an error that a rank has reported.
    """

    def __init__(
        self,
        addresses: Addresses,
        rank: int,
        calls: Iterable[tuple[int, int]],
        answers: Iterable[tuple[int, int]],
        look: Callable[[], None],
    ) -> None:
        self._addresses = addresses
        self._rank = rank
        self._look = look
        self._looked = self._probed = time.monotonic()
        self._answers = frozenset(answers)
        self._to_call = dict.fromkeys(sorted(calls), 0.0)  # with the time of the call
        self._missing = {*self._to_call, *self._answers}
        planes = 1 + max((plane for plane, _ in self._missing), default=0)
        self._process_mesh: list[dict[int, socket.socket]] = [{} for _ in range(planes)]
        self._greetings: dict[int, Handshake] = {}
        self._whose: dict[int, int] = {}
        self._unreachable: dict[int, float] = {}
        self._silent: set[int] = set()
        self._poll = select.poll()

    def run(self, listener: socket.socket) -> list[dict[int, socket.socket]]:
        """Make all connections; return a dict per plane, from rank to connection."""
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        try:
            while self._missing:
                self._call_those_below()
                for descriptor, events in self._poll.poll(_SLEEP_MS):
                    self._serve(listener, descriptor, events)
                self._look_around()
        except BaseException:
            for plane in self._process_mesh:
                for connection in plane.values():
                    connection.close()
            raise
        finally:
            for handshake in self._greetings.values():
                handshake.connection.close()
        return self._process_mesh

    # -- calling -------------------------------------------------------------------------------------------

    def _call_those_below(self) -> None:
        now = time.monotonic()
        for plane, other in [key for key, at in self._to_call.items() if at <= now]:
            del self._to_call[plane, other]
            self._call(plane, other)

    def _call(self, plane: int, other: int) -> None:
        try:
            found = socket.getaddrinfo(*self._addresses.of(other), type=socket.SOCK_STREAM)
            family, _, _, _, target = found[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        except socket.gaierror as error:
            self._not_reached(plane, other, error)
            return
        connection.setblocking(False)
        handshake = Handshake(connection, other, plane, connecting=True)
        self._greetings[connection.fileno()] = handshake
        try:
            connection.connect(target)
        except BlockingIOError:
            self._poll.register(connection, select.POLLOUT)
        except OSError as error:
            self._drop(connection.fileno())
            self._not_reached(plane, other, error)
        else:
            self._poll.register(connection, select.POLLOUT)

    def _not_reached(self, plane: int, other: int, error: OSError) -> None:
        """Call a rank again later if it could be reached a moment ago, as a network may be busy."""
        now = time.monotonic()
        since = self._unreachable.setdefault(other, now)
        if now - since < _UNREACHABLE_S:
            self._to_call[plane, other] = now + _AGAIN_S
            return
        self._look()
        address, port = self._addresses.of(other)
        raise as_limit(error, len(self._missing) + 1) or MeshError(
            f"rank {other} cannot be reached at {address}:{port} ({error}); expected an address that all "
            "ranks can reach: set FXDP_HOST on that rank to the right one of its addresses (or see its "
            "output, if it has ended)"
        ) from error

    # -- events --------------------------------------------------------------------------------------------

    def _serve(self, listener: socket.socket, descriptor: int, events: int) -> None:
        if descriptor == listener.fileno():
            self._answer(listener)
        elif descriptor in self._greetings:
            self._greet(descriptor)
        elif descriptor in self._whose and events & _HUNG_UP:
            self._gone(self._whose[descriptor])

    def _answer(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            connection.setblocking(False)
            strangers = [d for d, handshake in self._greetings.items() if handshake.called is None]
            if len(strangers) >= _STRANGERS:
                self._drop(strangers[0])
            self._greetings[connection.fileno()] = Handshake(connection)
            self._poll.register(connection, select.POLLIN)

    def _greet(self, descriptor: int) -> None:
        handshake = self._greetings[descriptor]
        try:
            if handshake.connecting:
                self._say_hello(handshake)
                return
            met = handshake.read(self._addresses.token)
        except StrangerError as error:
            self._drop(descriptor)
            if handshake.called is not None:
                self._not_reached(handshake.plane, handshake.called, OSError(str(error)))
            return
        if met is not None:
            self._join(handshake, *met)

    def _say_hello(self, handshake: Handshake) -> None:
        assert handshake.called is not None
        number = handshake.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number:
                raise OSError(number, os.strerror(number))
            words = hello(self._addresses.token, self._rank, handshake.plane)
            handshake.connection.send(words, NO_SIGNAL)
        except OSError as error:
            self._drop(handshake.connection.fileno())
            self._not_reached(handshake.plane, handshake.called, error)
            return
        handshake.connecting = False
        self._poll.modify(handshake.connection, select.POLLIN)

    def _join(self, handshake: Handshake, other: int, plane: int) -> None:
        descriptor = handshake.connection.fileno()
        if handshake.called is None:
            if (plane, other) not in self._answers:
                self._drop(descriptor)
                return
            known = self._process_mesh[plane].get(other)
            if known is not None:  # the caller has not received the welcome on that one
                self._poll.unregister(known)
                del self._whose[known.fileno()]
                known.close()
            try:
                handshake.connection.send(welcome(self._rank), NO_SIGNAL)
            except OSError:
                self._drop(descriptor)
                return
        del self._greetings[descriptor]
        self._missing.discard((plane, other))
        self._process_mesh[plane][other] = handshake.connection
        self._whose[descriptor] = other
        self._poll.modify(handshake.connection, _HUNG_UP)

    def _drop(self, descriptor: int) -> None:
        connection = self._greetings.pop(descriptor).connection
        with contextlib.suppress(KeyError):
            self._poll.unregister(connection)
        connection.close()

    # -- looking around ------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        now = time.monotonic()
        if not self._missing or now - self._looked < self._addresses.look_s:
            return
        self._looked = now
        self._look()
        self._addresses.check_time(sorted({other for _, other in self._missing}))
        if now - self._probed > _PROBE_S:
            self._probed = now
            self._probe_callers()

    def _probe_callers(self) -> None:
        """Raise if a rank that should call no longer listens at the published address.

        Every rank listens until all connections are made. A rank must fail to answer twice, as a call from
        there may be on the way.
        """
        silent = self._addresses.silent(sorted({other for _, other in self._missing & self._answers}))
        again, self._silent = silent & self._silent, silent
        if again:
            self._gone(min(again))

    def _gone(self, other: int) -> None:
        """Raise for a rank that has ended, after waiting briefly for a reported error."""
        for _ in range(5):
            self._look()
            time.sleep(0.1)
        raise RankFailedError(str(Departure(other, DepartureKind.KILLED)))
