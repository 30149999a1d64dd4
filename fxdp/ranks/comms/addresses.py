"""Where the ranks of a mesh listen, as they publish it in the store; and who of them no longer does."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from fxdp.errors import MeshError, RankFailedError
from fxdp.ranks.comms.failure_broadcast import KeyValueStore, store_lost

_LOOK_S = 0.5  # how often to look for notices
_LOOK_S_PER_RANK, _LONGEST_LOOK_S = 0.0005, 4.0  # a store answers some 50,000 requests in a second
_REFUSED_S = 0.2  # how long to wait for the answer of a rank that may be gone
_LISTED = 16  # ranks to be named in an error


class Addresses:
    """The addresses of the ranks of one mesh.

    Parameters
    ----------
    store : shared by all ranks.
    prefix : of the keys.
    timeout_s : how long ranks have to come.
    size : how many there are: the more, the less often each one asks the store.
    tree_above : the setting, which must be the same on all ranks.
    first : the lowest of them.

    Attributes
    ----------
    token : the mesh's secret, which the first rank makes.
    look_s : how often to look for notices.
    rows : the first rank of the row of each rank that was waited for.
    """

    def __init__(
        self, store: KeyValueStore, prefix: str, timeout_s: float, size: int = 2, tree_above: int = 0,
        first: int = 0,
    ) -> None:  # fmt: skip
        self.token = b""
        self.look_s = min(max(_LOOK_S, size * _LOOK_S_PER_RANK), _LONGEST_LOOK_S)
        self._tree_above = tree_above
        self._first = first
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.rows: dict[int, int] = {}
        self._known: dict[int, tuple[str, int]] = {}

    def publish(self, rank: int, host: str, port: int, row: int = 0) -> None:
        """This rank's own address, and the first rank of its row.

        Raises
        ------
        RankFailedError : the store is gone.
        """
        try:
            if rank == self._first:
                self._store.set(f"{self._prefix}/token", f"{secrets.token_hex(16)} {self._tree_above}")
            self._store.set(self._key(rank), f"{host} {port} {row}")
        except RuntimeError as error:
            raise store_lost(error) from error

    def wait_for(self, ranks: Sequence[int], look: Callable[[], None]) -> None:
        """Read the token and the addresses of `ranks`; `look` is asked meanwhile.

        Raises
        ------
        RankFailedError : some have not come in time, or the store is gone.
        MeshError : rank 0 joins ranks in another way.
        """
        keys = [f"{self._prefix}/token", *map(self._key, ranks)]
        token, *found = self.read(keys, look, lambda: self.check_time(ranks))
        self._check_token(token)
        self.rows = {rank: int(address.split()[2]) for rank, address in zip(ranks, found, strict=True)}
        self.know({rank: _parsed(address) for rank, address in zip(ranks, found, strict=True)})

    def read(self, keys: list[str], look: Callable[[], None], late: Callable[[], None]) -> list[str]:
        """What other ranks write at `keys`; `look` and `late` are asked meanwhile, and may raise."""
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=self.look_s))
                return [value.decode() for value in self._store.multi_get(keys)]
            except RuntimeError as error:
                if isinstance(error, dist.DistNetworkError):
                    raise store_lost(error) from error
            look()
            late()

    def know(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Addresses that were found in another way."""
        self._known = dict(addresses)

    def _check_token(self, text: str) -> None:
        token, above = text.split()
        self.token = bytes.fromhex(token)
        if int(above) != self._tree_above:
            raise MeshError(
                f"FXDP_TREE_ABOVE is {self._tree_above} on this rank and {above} on the first rank of the "
                "mesh; expected the same on all ranks"
            )

    def of(self, rank: int) -> tuple[str, int]:
        """The address of a rank that was waited for."""
        return self._known[rank]

    def check_time(self, missing: Sequence[int], later_s: float = 0.0) -> None:
        """Once time is up, and these seconds, name those of `missing` that have not come.

        Others of them wait for those, too.

        Raises
        ------
        RankFailedError : it is.
        """
        if time.monotonic() < self._deadline + later_s:
            return
        absent = [rank for rank in missing if not self._store.check([self._key(rank)])]
        absent = absent or list(missing) or [self._first]  # which has the token
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
    where, port, _ = address.split()
    return where, int(port)
