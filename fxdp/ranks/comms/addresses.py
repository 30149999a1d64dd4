"""Addresses of the ranks of a mesh, published in the store, and checks whether ranks still listen there."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from fxdp.errors import MeshError, RankFailedError
from fxdp.ranks.liveness.failure_broadcast import KeyValueStore, store_lost

_PAUSE_S = 0.001  # the first one between two questions to the store
_LOOK_S = 0.5  # interval of checks for failures
_LOOK_S_PER_RANK, _LONGEST_LOOK_S = 0.0005, 4.0  # a store answers some 50,000 requests per second
_REFUSED_S = 0.2  # timeout for connecting to a rank that may be gone
_LISTED = 16  # most ranks named in an error


class Addresses:
    """The addresses of the ranks of one mesh.

    Parameters
    ----------
    store : shared by all ranks.
    prefix : prefix of the keys.
    timeout_s : seconds in which all ranks must join.
    size : number of ranks: the more, the less often each rank asks the store.
    tree_above : the setting, which must be equal on all ranks.
    first : the lowest rank.

    Attributes
    ----------
    token : the mesh's secret, made by the first rank.
    look_s : interval of checks for failures.
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
        """Publish this rank's address, and the first rank of the row.

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
        """Read the token and the addresses of `ranks`; `look` is called at intervals.

        Raises
        ------
        RankFailedError : some ranks have not joined in time, or the store is gone.
        MeshError : rank 0 uses a different `tree_above`.
        """
        keys = [f"{self._prefix}/token", *map(self._key, ranks)]
        token, *found = self.read(keys, look, lambda: self.check_time(ranks))
        self._check_token(token)
        self.rows = {rank: int(address.split()[2]) for rank, address in zip(ranks, found, strict=True)}
        self.know({rank: _parsed(address) for rank, address in zip(ranks, found, strict=True)})

    def read(self, keys: list[str], look: Callable[[], None], late: Callable[[], None]) -> list[str]:
        """Return the values that ranks write at `keys`; meanwhile call `look` and `late`, which may raise."""
        pause, next_look = _PAUSE_S, time.monotonic() + self.look_s
        try:
            while not self._store.check(keys):  # the store's own wait would warn on stderr whenever it ends
                time.sleep(pause := min(2 * pause, self.look_s / 10))
                if time.monotonic() > next_look:
                    look()
                    late()
                    next_look += self.look_s
            return [value.decode() for value in self._store.multi_get(keys)]
        except dist.DistError as error:
            raise store_lost(error) from error

    def know(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Set addresses that were found by different means."""
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
        """Return the address of a rank that was waited for."""
        return self._known[rank]

    def check_time(self, missing: Sequence[int], later_s: float = 0.0) -> None:
        """After the deadline plus `later_s`, raise for the ranks of `missing` that have not joined.

        If all of `missing` have joined, then the missing ranks are named as they are.

        Raises
        ------
        RankFailedError : the deadline has passed.
        """
        if time.monotonic() < self._deadline + later_s:
            return
        absent = [rank for rank in missing if not self._store.check([self._key(rank)])]
        absent = absent or list(missing) or [self._first]  # the first rank has the token
        listed = ", ".join(map(str, absent[:_LISTED]))
        more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
        raise RankFailedError(
            f"rank {listed}{more} did not join the mesh within {self._timeout_s:g} s; expected all ranks to "
            "call fxdp.compile with the same mesh (set FXDP_TIMEOUT_S if one may need longer)"
        )

    def silent(self, ranks: Sequence[int]) -> set[int]:
        """Return the first few of `ranks` that have published an address but no longer listen."""
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
