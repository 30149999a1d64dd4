"""Where the ranks of a mesh listen, as they publish it in the store; and who of them no longer does."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from fxdp.errors import RankFailedError
from fxdp.ranks.links.notices import KeyValueStore, store_lost

_LOOK_S = 0.5  # how often to look for notices
_REFUSED_S = 0.2  # how long to wait for the answer of a rank that may be gone
_LISTED = 16  # ranks to be named in an error


class Addresses:
    """The addresses of the ranks of one mesh.

    Parameters
    ----------
    store : shared by all ranks.
    prefix : of the keys.
    timeout_s : how long ranks have to come.

    Attributes
    ----------
    token : the mesh's secret, which rank 0 makes.
    """

    def __init__(self, store: KeyValueStore, prefix: str, timeout_s: float) -> None:
        self.token = b""
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._known: dict[int, tuple[str, int]] = {}

    def publish(self, rank: int, host: str, port: int) -> None:
        """This rank's own address.

        Raises
        ------
        RankFailedError : the store is gone.
        """
        try:
            if rank == 0:
                self._store.set(f"{self._prefix}/token", secrets.token_hex(16))
            self._store.set(self._key(rank), f"{host} {port}")
        except RuntimeError as error:
            raise store_lost(error) from error

    def wait_for(self, ranks: Sequence[int], look: Callable[[], None]) -> None:
        """Read the token and the addresses of `ranks`; `look` is asked meanwhile.

        Raises
        ------
        RankFailedError : some have not come in time, or the store is gone.
        """
        keys = [f"{self._prefix}/token", *map(self._key, ranks)]
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=_LOOK_S))
                token, *found = (value.decode() for value in self._store.multi_get(keys))
                break
            except RuntimeError as error:
                if isinstance(error, dist.DistNetworkError):
                    raise store_lost(error) from error
            look()
            self.check_time(ranks)
        self.token = bytes.fromhex(token)
        self._known = {rank: _parsed(address) for rank, address in zip(ranks, found, strict=True)}

    def of(self, rank: int) -> tuple[str, int]:
        """The address of a rank that was waited for."""
        return self._known[rank]

    def check_time(self, missing: Sequence[int]) -> None:
        """Once time is up, name those of `missing` that have not come; others of them wait for those, too.

        Raises
        ------
        RankFailedError : it is.
        """
        if time.monotonic() < self._deadline:
            return
        absent = [rank for rank in missing if not self._store.check([self._key(rank)])]
        absent = absent or list(missing) or [0]  # rank 0 has the token
        listed = ", ".join(map(str, absent[:_LISTED]))
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        raise RankFailedError(
            f"rank {listed}{more} did not join the mesh within {self._timeout_s:g} s; expected all ranks to "
            "call fxdp.compile with the same mesh (set FXDP_TIMEOUT_S if one may need longer)"
        )

    def silent(self, ranks: Sequence[int]) -> set[int]:
        """Those of `ranks` (of the first few) that have published an address where nobody listens now."""
        found: set[int] = set()
        for rank in ranks[:_LISTED]:
            if not self._store.check([self._key(rank)]):
                continue
            try:
                where = _parsed(self._store.get(self._key(rank)).decode())
                socket.create_connection(where, timeout=_REFUSED_S).close()
            except ConnectionRefusedError:
                found.add(rank)
            except OSError:
                continue
        return found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _parsed(address: str) -> tuple[str, int]:
    where, port = address.split()
    return where, int(port)
