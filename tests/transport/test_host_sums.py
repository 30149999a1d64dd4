"""Sums between hosts: the same bits on all ranks, whoever is where, and no hang when a rank leaves."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.errors import RankFailedError
from fxdp.ranks.comms import opening
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.messages import LinkBrokenError
from fxdp.settings import Settings
from fxdp.transport import cpu_transport
from fxdp.transport import host_places as places_module
from fxdp.transport.host_places import HostPlaces, host_places
from fxdp.transport.host_sums import HostSums
from tests.limits import HANG_S, scaled
from tests.rank_pool import RankPool
from tests.ranks.comms.test_messages import _ranks
from tests.ranks.tree.small_trees import together
from tests.transport.test_shared_memory import _terms

Hosts = tuple[tuple[int, ...], ...]
_EVEN: Hosts = ((0, 1), (2, 3))


@contextlib.contextmanager
def _sums(hosts: Hosts, timeout_s: float = HANG_S) -> Iterator[list[HostSums]]:
    """Ranks in one process, of which those of a host have connections of their own, as have those across."""
    places, store = HostPlaces(hosts), dist.HashStore()  # type: ignore[call-arg]
    size = sum(map(len, hosts))

    def across(rank: int) -> Any:
        mine = places.of(rank)
        share = mine.index(rank)
        if share >= places.shares:
            return None
        place = next(i for i, host in enumerate(hosts) if rank in host)
        wait = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(dist.PrefixStore(str(share), store), place, len(hosts), wait)  # type: ignore[attr-defined]

    with _ranks(size, timeout_s) as messages:
        for one in messages:
            away = [peer for peer in one._peers if peer.rank not in places.of(one.rank)]
            one._peers = [peer for peer in one._peers if peer.rank in places.of(one.rank)]
            for peer in away:
                peer.connection.close()
        with ThreadPoolExecutor(size) as pool:
            groups = list(pool.map(across, range(size)))
        made = [HostSums(one, places, group) for one, group in zip(messages, groups, strict=True)]
        yield made
        for sums in made:
            sums.close()


@pytest.mark.parametrize("hosts", [_EVEN, ((0, 1), (2,)), ((0, 2, 4), (1, 3)), ((0,), (1, 2), (3,))])
def test_sums_of_growing_and_shrinking_values(hosts: Hosts) -> None:
    lengths = (5, 100_000, 1, 40, 300_000, 2, 70_000, 70_001, 3)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex128)
    size = sum(map(len, hosts))
    terms = [_terms(length, size, dtypes[i % 5]) for i, length in enumerate(lengths)]

    def action(rank: HostSums) -> list[Tensor]:
        begun = []
        for index, of_ranks in enumerate(terms):
            value = of_ranks[rank._rank].clone()
            begun.append((rank.start(value), value))
            if index % 4 == 3:  # several under way, the last one finished first
                rank.finish(begun[-1][0])
        for one, _ in begun:
            rank.finish(one)
        return [value for _, value in begun]

    with _sums(hosts) as sums:
        found = together(sums, action)  # type: ignore[type-var]
    for i, of_ranks in enumerate(terms):
        assert all(torch.equal(values[i], found[0][i]) for values in found)
        exact = torch.stack(of_ranks).to(torch.complex128).sum(0)
        largest = torch.stack(of_ranks).to(torch.complex128).abs().sum(0)
        few = 0.0 if dtypes[i % 5] is torch.int64 else torch.finfo(dtypes[i % 5]).eps * size
        assert ((found[0][i].to(torch.complex128) - exact).abs() <= few * largest).all()


def test_a_rank_of_the_same_host_that_leaves_ends_the_wait() -> None:
    with _sums(_EVEN) as sums:
        begun = sums[0].start(torch.ones(8))
        sums[1].messages.cut()
        with pytest.raises(LinkBrokenError, match="the connection to rank 1 was closed"):
            sums[0].finish(begun)


def test_a_late_rank_is_left_to_those_who_know_where_it_is() -> None:
    """As of gloo: who is late is found out by asking, as the rank of this host may wait for another one."""
    with _sums(_EVEN, timeout_s=scaled(0.3)) as sums:
        begun = sums[0].start(torch.ones(8))
        with pytest.raises(RuntimeError, match="timed out waiting for ranks of this host") as found:
            sums[0].finish(begun)
        assert not isinstance(found.value, RankFailedError)


class _Told:
    """Rounds of ranks that are threads."""

    def __init__(self, rank: int, parts: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self._parts, self._barrier = rank, parts, barrier

    def exchange(self, data: bytes) -> list[bytes]:
        self._parts[self.rank] = data
        self._barrier.wait(HANG_S)
        found = list(self._parts)
        self._barrier.wait(HANG_S)
        return found


def _found(
    monkeypatch: pytest.MonkeyPatch, spaces: str, rows: Sequence[Sequence[int]], unwilling: Sequence[int] = ()
) -> list[Hosts]:
    """What each rank finds, where those with the same letter see the same processes."""
    here, size = threading.local(), len(spaces)
    monkeypatch.setattr(places_module, "process_space", lambda: here.space)
    parts, barrier = [b""] * size, threading.Barrier(size)

    def action(rank: int) -> Hosts:
        here.space = spaces[rank].encode() * 8
        row = next(row for row in rows if rank in row)
        control = cast(Channel, _Told(rank, parts, barrier))
        return host_places(control, row, rank not in unwilling).hosts

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(action, range(size)))


def test_who_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(spaces: str, *rows: Sequence[int], unwilling: Sequence[int] = ()) -> Hosts:
        (one,) = set(_found(monkeypatch, spaces, rows or [range(len(spaces))], unwilling))
        return one

    assert found("aaa") == ((0, 1, 2),)
    assert found("aabb") == ((0, 1), (2, 3))
    assert found("abab") == ((0, 2), (1, 3))
    assert found("aab") == ((0, 1), (2,))
    assert found("abc") == ()  # nothing to share
    assert found("aabb", unwilling=[3]) == ()
    assert found("aabb", (0, 1), (2, 3)) == ((0, 1),)  # each stage on a host of its own
    assert found("aabbaabb", (0, 1, 2, 3), (4, 5, 6, 7)) == ((0, 1), (2, 3))  # both stages on both hosts
    assert found("aaab", (0, 1), (2, 3)) == ()  # of two stages one is on one host, the other one on two
    assert [HostPlaces(h).several for h in (_EVEN, ((0, 1, 2),), ((0,), (1,)))] == [True, False, False]


def _as_on_two_hosts(cheaper: bool) -> tuple[tuple[int, ...], bool, list[bool], bool]:
    """Links of four processes, of which two and two see the same processes, and sums over them."""
    rank = dist.get_rank()
    real: Callable[[], bytes] = places_module.process_space
    kept = cpu_transport.is_cheaper
    places_module.process_space = lambda: real()[:7] + bytes([rank // 2])
    cpu_transport.is_cheaper = lambda one, other: cheaper
    try:
        comms = opening.open_comms(rank, range(4), range(4), "gloo", Settings(timeout_s=HANG_S))
    finally:
        places_module.process_space, cpu_transport.is_cheaper = real, kept
    equal = []
    for length, op in itertools.product((3, 100_000), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
        terms = [torch.arange(float(length)) * (r + 1) for r in range(4)]
        options = dist.AllreduceOptions()
        options.reduceOp = op
        value = terms[rank].clone()
        comms.transport._group.allreduce([value], options).wait()
        wanted = torch.stack(terms)
        equal.append(torch.equal(value, wanted.sum(0) if op == dist.ReduceOp.SUM else wanted.amax(0)))
    mates = () if comms.transport.hosts is None else comms.transport.hosts._mates
    comms.liveness.close()
    return mates, comms.transport.memory is None, equal, comms.transport.cost is not None


def test_links_of_two_hosts(ranks: RankPool) -> None:
    """Both ways: where sums over hosts are cheaper, and where they are not."""
    assert ranks.run(4, _as_on_two_hosts, True) == [
        ((0, 1) if rank < 2 else (2, 3), True, [True] * 4, True) for rank in range(4)
    ]
    assert ranks.run(4, _as_on_two_hosts, False) == [((), True, [True] * 4, True)] * 4
