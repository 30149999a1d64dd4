"""`ForkedStore`: a store of forks of this process, whose threads start after the forks.

    store = ForkedStore()       the port is known, and connections wait
    os.fork() ...               each fork: store.leave()
    store.serve()               this process: answers them

A fork has only the thread that forks, so a lock that another thread held at that moment is never free in it.
"""

from __future__ import annotations

import socket

from fxdp.torch_compat import TCPStore

_HOST = "127.0.0.1"
_WAITING = 1024  # the most connections that wait until this process serves; Linux has a bound of its own


class ForkedStore:
    """A store on a free port of this machine.

    Attributes
    ----------
    port : the port, for the forks.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((_HOST, 0), backlog=_WAITING)
        self.port: int = self._listener.getsockname()[1]
        self._store: TCPStore | None = None

    def leave(self) -> None:
        """Close the port in a fork, so that it ends with this process."""
        self._listener.close()

    def serve(self) -> None:
        """Answer the forks as long as this object lives."""
        fd = self._listener.detach()
        self._store = TCPStore(_HOST, self.port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
