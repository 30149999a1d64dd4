"""Failure broadcast through the store, for ranks that wait in start-up without connections.

    fxdp/failures                      number of processes that have ended by an error
    fxdp/failure/3                     the third: rank and message
    fxdp/<ranks>/1/failures            number of ranks that could not join this mesh, while others wait
    fxdp/<ranks>/1/failure/1           ...

A rank that waits looks here about twice a second, by one small request as long as there is nothing new.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from typing import Protocol

from fxdp.errors import RankFailedError
from fxdp.ranks.liveness.departure import TEXT_LIMIT, Departure, DepartureKind, harmless
from fxdp.torch_compat import world_group

_EVERYWHERE = "fxdp"
"""Key prefix for a process that ends; different prefixes belong to meshes that are being opened."""
_TELL_S = 2.0
_LONGEST = 8 * TEXT_LIMIT  # most bytes of an entry


class KeyValueStore(Protocol):
    """The methods needed from torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def multi_get(self, keys: list[str]) -> list[bytes]: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


def _tell(store: KeyValueStore, name: str, rank: int, text: str) -> None:
    """Record in the store that global rank `rank` has failed."""
    number = store.add(f"{name}/failures", 1)
    store.set(f"{name}/failure/{number}", json.dumps([rank, text[:TEXT_LIMIT]]))


def broadcast_everywhere(text: str) -> None:
    """Record that this process ends, for all ranks that wait in start-up."""
    world = world_group()
    if world is not None and world.size() > 1:
        _broadcast_briefly(world.get_group_store(), _EVERYWHERE, world.rank(), text)


def _broadcast_briefly(store: KeyValueStore, name: str, rank: int, text: str) -> None:
    """Call `_tell` with a timeout of two seconds, as another thread may block the store."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            _tell(store, name, rank, text)

    thread = threading.Thread(target=run, name="fxdp-notice", daemon=True)
    thread.start()
    thread.join(_TELL_S)


class FailureBroadcast:
    """The broadcast failures that concern the ranks of one mesh.

    Parameters
    ----------
    store : shared by all ranks.
    name : key prefix of the mesh that is being opened.
    ranks : the global ranks of the mesh, in mesh order.
    rank : this rank's index in `ranks`.
    """

    def __init__(self, store: KeyValueStore, name: str, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._name = name
        self._places = {global_rank: place for place, global_rank in enumerate(ranks) if place != rank}
        self._read = {_EVERYWHERE: 0, name: 0}
        self._come_back(ranks[rank])

    def look(self) -> None:
        """Raise the first new failure of a rank of the mesh.

        Raises
        ------
        RankFailedError : a rank has failed, or the store is gone.
        """
        try:
            found = [departure for name in self._read for departure in self._news(name)]
        except RuntimeError as error:
            raise store_lost(error) from error
        if found:
            raise RankFailedError(str(found[0]))

    def tell(self, rank: int, text: str) -> None:
        """Broadcast the reason why this rank does not join the mesh."""
        _broadcast_briefly(self._store, self._name, rank, text)

    def _come_back(self, rank: int) -> None:
        """Mark earlier failures of this rank as past: the process has caught the reported error."""
        if told := self._store.add(f"{_EVERYWHERE}/failures", 0):
            self._store.set(f"{_EVERYWHERE}/back/{rank}", str(told))

    def _is_back(self, rank: int, number: int) -> bool:
        key = f"{_EVERYWHERE}/back/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= number

    def _news(self, name: str) -> list[Departure]:
        found: list[Departure] = []
        while self._store.check([f"{name}/failure/{self._read[name] + 1}"]):
            self._read[name] += 1
            rank, departure = self._parsed(self._store.get(f"{name}/failure/{self._read[name]}"))
            if departure is not None and not (name == _EVERYWHERE and self._is_back(rank, self._read[name])):
                found.append(departure)
        return found

    def _parsed(self, notice: bytes) -> tuple[int, Departure | None]:
        """Return the global rank and the departure; None for a rank outside this mesh or an invalid entry."""
        try:
            rank, text = json.loads(notice[:_LONGEST])
            place = self._places.get(int(rank))
        except (ValueError, TypeError):
            return -1, None
        return int(rank), None if place is None else Departure(
            place, DepartureKind.FAILED, harmless(str(text))
        )


def store_lost(error: BaseException) -> RankFailedError:
    """Return the error for a store that no longer answers."""
    return RankFailedError(
        "the process group's store does not answer any more: the process that has it (rank 0, or torchrun's "
        f"agent) has ended, see its output\ntorch: {str(error).splitlines()[0]}"
    )
