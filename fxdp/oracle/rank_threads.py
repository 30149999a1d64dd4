"""Ranks as threads of this process, one of which runs at a time, and the collectives between them.

    rank 0   runs to its first collective, leaves its value, and waits
    rank 1   the same
    rank 0   finds the values of all ranks, and runs to its second collective
    ...

So generators and other state of the process are used by one rank at a time, in an order that is always the
same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fxdp.errors import VerifierError
from fxdp.ir.ops.parameter_shards import start_all_gather_shards
from fxdp.torch_compat import TorchDispatchMode

_T = TypeVar("_T")


class RankThreads:
    """The ranks of one run, by number; each object serves one call of `run`."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._turn = 0
        self._running = set(range(world))
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._exchanges: dict[int, dict[int, Any]] = {}
        self._counts = [0] * world

    def run(self, call: Callable[[int], _T]) -> list[_T]:
        """Return `call(rank)` of every rank; an error of one rank ends the call on all.

        Raises
        ------
        VerifierError : the ranks start different numbers of collectives.
        """
        found: dict[int, _T] = {}
        threads = [threading.Thread(target=self._run, args=(rank, call, found)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [found[rank] for rank in range(self.world)]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values that all ranks passed to their call of the same number."""
        number = self._counts[rank]
        self._counts[rank] += 1
        with self._change:
            gathered = self._exchanges.setdefault(number, {})
            gathered[rank] = value
            self._pass_on(rank)
            self._wait_for(rank)
            if len(gathered) < self.world:
                missing = sorted(set(range(self.world)) - gathered.keys())
                raise VerifierError(f"ranks {missing} start fewer collectives than rank {rank}: a fault")
            self._exchanges.pop(number - 1, None)
            return [gathered[peer] for peer in range(self.world)]

    def _run(self, rank: int, call: Callable[[int], _T], found: dict[int, _T]) -> None:
        try:
            with self._change:
                self._wait_for(rank)
            with _Collectives(self, rank):
                found[rank] = call(rank)
        except _Stopped:
            pass
        except BaseException as error:  # raised again by `run`
            self._error = self._error or error
        with self._change:
            self._running.discard(rank)
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        following = ((rank + step) % self.world for step in range(1, self.world + 1))
        self._turn = next((peer for peer in following if peer in self._running), rank)
        self._change.notify_all()

    def _wait_for(self, rank: int) -> None:
        self._change.wait_for(lambda: self._turn == rank or self._error is not None)
        if self._error is not None:
            raise _Stopped


class _Stopped(Exception):  # noqa: N818 - no error: another rank has one
    """Ends a rank after an error of another."""


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the functional collectives that a rank's thread calls; at once, so that no wait is left."""

    def __init__(self, threads: RankThreads, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads, self._rank = threads, rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op as it is, but for collectives."""
        if func is start_all_gather_shards:
            rows, sizes, *_ = args
            given = zip(rows, sizes, strict=True)
            padded = [F.pad(value.reshape(-1), (0, size - value.numel())) for value, size in given]
            found = self._threads.exchange(self._rank, padded)
            return torch.cat([value for of_ranks in zip(*found, strict=True) for value in of_ranks])
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return args[0]
        value, *rest = args
        found = self._threads.exchange(self._rank, (value.clone(), rest))
        return _ANSWERS[name]([value for value, _ in found], [rest for _, rest in found], self._rank)


def _all_to_all(values: Sequence[Tensor], rests: Sequence[Any], rank: int) -> Tensor:
    pairs = zip(values, rests, strict=True)
    return torch.cat([torch.split(value, list(sent))[rank] for value, (_, sent, *_) in pairs])


def _all_reduce(values: Sequence[Tensor], rests: Sequence[Any], rank: int) -> Tensor:
    stacked = torch.stack([*values])
    if rests[rank][0] == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if rests[rank][0] == "max" else stacked.amin(0)


def _reduce_scatter(values: Sequence[Tensor], rests: Sequence[Any], rank: int) -> Tensor:
    return torch.stack([*values]).sum(0).chunk(len(values))[rank]


_ANSWERS: dict[str, Callable[[Sequence[Tensor], Sequence[Any], int], Tensor]] = {
    "all_gather_into_tensor": lambda values, rests, rank: torch.cat([*values]),
    "all_to_all_single": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter_tensor": _reduce_scatter,
    "broadcast": lambda values, rests, rank: values[rests[rank][0]].clone(),
}
"""Result on a rank from the values and the further arguments of all ranks, by collective."""
