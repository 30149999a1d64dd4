"""Sums in the ranks' own values: to the last bit, in no other memory, and nobody's again too early."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.messages import LinkBrokenError, Messages
from fxdp.ranks.mesh_init import init_mesh
from fxdp.transport.direct_sums import DirectSums, Reduction
from fxdp.transport.host_places import host_places
from fxdp.transport.in_flight import Begun, InFlight
from fxdp.transport.other_memory import OtherMemory, Stretch
from tests.rank_pool import RankPool
from tests.ranks.comms.test_messages import _ranks
from tests.ranks.tree.small_trees import together
from tests.transport.test_shared_memory import _terms


class _Sums:
    """Those of one rank, each taken to its end when it is waited for."""

    def __init__(self, messages: Messages, size: int) -> None:
        self._sums, self._in_flight = DirectSums(messages, size), InFlight()

    def start(self, value: torch.Tensor, function: Reduction) -> Begun:
        self._in_flight.go_on()
        return self._in_flight.begin(self._sums.start([value], function))

    def finish(self, begun: Begun) -> None:
        self._in_flight.finish(begun)


@contextlib.contextmanager
def _sums(size: int) -> Iterator[list[tuple[Messages, _Sums]]]:
    """Ranks in one process, which read one another's values as other processes would."""
    with _ranks(size) as messages:
        yield [(one, _Sums(one, size)) for one in messages]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_rank_order_lie_where_the_values_lay(size: int) -> None:
    lengths = (0, 1, 5, 40, 65_537, 300_000, 70_001, 200_000)  # none, fewer than ranks, one tile and several
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)
    functions = torch.add, torch.maximum, torch.minimum

    def action(rank: tuple[Messages, _Sums]) -> list[bool]:
        messages, sums = rank
        equal = []
        for index, length in enumerate(lengths):
            terms = _terms(length, size, dtypes[index % 5])
            function = torch.add if terms[0].is_complex() else functions[index % 3]
            wanted, own = reduce(function, terms), terms[messages.rank].clone()
            address = own.data_ptr()
            sums.finish(sums.start(own, function))
            equal.append(torch.equal(own, wanted) and own.data_ptr() == address)
        return equal

    with _sums(size) as ranks:
        assert together(ranks, action) == [[True] * len(lengths)] * size


def test_a_value_is_its_owners_again_when_all_have_read_it() -> None:
    """Rank 0 writes into its sum as soon as it has it, while rank 1 reads it more slowly than anybody."""
    slow = threading.local()
    read = OtherMemory.read

    def slowly(self: OtherMemory, process: int, stretches: Sequence[Stretch]) -> None:
        time.sleep(0.1 if getattr(slow, "now", False) else 0)
        read(self, process, stretches)

    def action(rank: tuple[Messages, _Sums]) -> bool:
        messages, sums = rank
        slow.now = messages.rank == 1
        own = torch.full((100_000,), 1.0 + messages.rank)
        sums.finish(sums.start(own, torch.add))
        right = bool((own == 3).all())
        own.zero_()
        return right

    with _sums(2) as ranks, mock.patch.object(OtherMemory, "read", slowly):
        assert together(ranks, action) == [True, True]


def test_sums_that_have_come_apart_and_memory_that_is_gone() -> None:
    def action(rank: tuple[Messages, _Sums]) -> None:
        messages, sums = rank
        sums.finish(sums.start(torch.ones(8 + messages.rank), torch.add))

    words = r"rank 1 came to a sum with 36 bytes; expected 32|rank 0 came to a sum with 32 bytes; expected 36"
    with _sums(2) as ranks, pytest.raises(RankFailedError, match=words):
        together(ranks, action)
    with _sums(2) as ((_, sums), (second, _)):
        begun = sums.start(torch.ones(8), torch.add)
        second.start(memoryview(struct.pack("<QQQ", os.getpid(), 32, 8)))
        with pytest.raises(LinkBrokenError, match="the value of rank 1 cannot be read: Bad address"):
            sums.finish(begun)


def test_a_rank_that_leaves_ends_the_wait() -> None:
    with _sums(3) as ranks:
        begun = [sums.start(torch.ones(8), torch.add) for _, sums in ranks[:2]]
        ranks[2][0].cut()
        for (_, sums), one in zip(ranks[:2], begun, strict=True):
            with pytest.raises(LinkBrokenError, match="the connection to rank 2 was closed"):
                sums.finish(one)


def _buffers() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:fxdp" in os.readlink(f"/proc/self/fd/{name}")
    return found


def _large() -> tuple[bool, list[bool], int]:
    """Real processes, several sums under way, waited for in another order."""
    process_mesh, before = init_mesh(None, "cpu"), _buffers()
    ops, name, rank = torch.ops._c10d_functional, process_mesh.mesh.group("messages"), dist.get_rank()
    terms = [_terms(length, 3, torch.float64) for length in (1_000_003, 70_001, 200_000)]
    begun = [ops.all_reduce(one[rank], "sum", name) for one in terms]
    found = [torch.equal(ops.wait_tensor(begun[i]), reduce(torch.add, terms[i])) for i in (2, 0, 1)]
    return process_mesh.mesh.direct_sums, found, _buffers() - before


def test_between_processes_without_a_buffer(ranks: RankPool) -> None:
    assert ranks.run(3, _large) == [(True, [True] * 3, 0)] * 3


def _places() -> list[tuple[bool, bool]]:
    comms = init_mesh(None, "cpu").comms
    assert comms is not None
    found = []
    for refused in (False, True):
        error = PermissionError(1, "Operation not permitted") if refused and dist.get_rank() == 1 else None
        with mock.patch.object(OtherMemory, "read", side_effect=error) if error else contextlib.nullcontext():
            places = host_places(comms.control, range(dist.get_world_size()), True)
        found.append((places.one, places.direct))
    return found


def test_one_rank_that_may_not_read_the_others_leaves_all_their_buffers(ranks: RankPool) -> None:
    assert ranks.run(3, _places) == [[(True, True), (True, False)]] * 3
