"""Handshake on a new connection: both sides identify themselves before anything else travels.

    caller                                           listener
    fxdp, version, token, own rank, plane    ->
                                             <-      fxdp, version, own rank

Either message may arrive in pieces. If the connection ends before the answer, the caller calls again; a
connection with any different content, as from a port scanner or a health check, is closed.
"""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass, field

from fxdp.errors import MeshError

_VERSION = 2
"""Version of all data between ranks: to be increased with any change of a frame."""

_MAGIC = b"fxdp"
_HELLO = struct.Struct("<4sB16sIB")  # version, the mesh's secret token, the calling rank, the plane
_WELCOME = struct.Struct("<4sBI")  # version, the answering rank


def hello(token: bytes, rank: int, plane: int) -> bytes:
    """Return the caller's message."""
    return _HELLO.pack(_MAGIC, _VERSION, token, rank, plane)


def welcome(rank: int) -> bytes:
    """Return the listener's answer."""
    return _WELCOME.pack(_MAGIC, _VERSION, rank)


class StrangerError(Exception):
    """Raised when the peer of a new connection is no rank of this mesh, or has gone."""


@dataclass(eq=False)
class Handshake:
    """A connection with an incomplete handshake.

    Attributes
    ----------
    called : the rank that was called; None if the peer has called.
    plane : the purpose of the connection.
    """

    connection: socket.socket
    called: int | None = None
    plane: int = 0
    connecting: bool = False
    effects: bytearray = field(default_factory=bytearray)

    def read(self, token: bytes) -> tuple[int, int] | None:
        """Return the peer's rank and the plane; None while the handshake is incomplete.

        Raises
        ------
        StrangerError : the content is no handshake, or the connection ended.
        MeshError : a rank with the token runs a different version of fxdp.
        """
        form = _HELLO if self.called is None else _WELCOME
        try:
            data = self.connection.recv(form.size - len(self.effects))
        except BlockingIOError:
            return None
        except OSError as error:
            raise StrangerError(str(error)) from error
        self.effects += data
        if not data or not (_MAGIC.startswith(self.effects[:4]) or self.effects[:4] == _MAGIC):
            raise StrangerError("the connection was closed" if not data else "something else was said")
        if len(self.effects) < form.size:
            return None
        return self._welcomed() if self.called is not None else self._hello(token)

    def _hello(self, token: bytes) -> tuple[int, int]:
        _, version, theirs, rank, plane = _HELLO.unpack(self.effects)
        if not secrets.compare_digest(theirs, token):
            raise StrangerError("it does not know the token")
        _check_version(version, rank)
        return rank, plane

    def _welcomed(self) -> tuple[int, int]:
        _, version, rank = _WELCOME.unpack(self.effects)
        _check_version(version, rank)
        if rank != self.called:
            raise StrangerError(f"rank {rank} answers there")
        return rank, self.plane


def _check_version(version: int, rank: int) -> None:
    """Refuse a rank with a different version of the protocol.

    Raises
    ------
    MeshError : the rank runs a different version of fxdp.
    """
    if version != _VERSION:
        raise MeshError(
            f"rank {rank} speaks version {version} of fxdp's protocol, this rank version {_VERSION}; "
            "expected the same release of fxdp on all ranks: install it anew where it is older"
        )
