"""Sums through shared memory: to the last bit, in few buffers, and no hang when a rank leaves."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.comms.messages import LinkBrokenError, Messages
from fxdp.ranks.mesh_init import init_mesh
from fxdp.transport.host_places import host_places
from fxdp.transport.shared_buffers import WHERE, SharedBuffer, open_buffer
from fxdp.transport.shared_memory import SharedMemory
from tests.rank_pool import RankPool
from tests.ranks.comms.test_messages import _ranks
from tests.ranks.tree.small_trees import together


@contextlib.contextmanager
def _memories(size: int) -> Iterator[list[tuple[Messages, SharedMemory]]]:
    """Ranks in one process, which find one another's buffers as other processes would."""
    with _ranks(size) as messages:
        made = [(one, SharedMemory(one, size)) for one in messages]
        yield made
        for _, memory in made:
            memory.close()


def _terms(size: int, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """Of very different sizes, so that the order of a sum shows in its last bits."""
    generator = torch.Generator().manual_seed(size)
    return [
        (torch.randn(size, generator=generator, dtype=torch.float64) * 7**r * 3).to(dtype)
        for r in range(ranks)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_in_rank_order_of_growing_and_shrinking_values(size: int) -> None:
    lengths = (5, 100_000, 1, 40, 300_000, 2, 70_000, 70_001)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)

    def action(rank: tuple[Messages, SharedMemory]) -> list[bool]:
        messages, memory = rank
        equal, begun = [], []
        for index, length in enumerate(lengths):
            terms = _terms(length, size, dtypes[index % 4])
            wanted = terms[0] + terms[1] if size == 2 else (terms[0] + terms[1]) + terms[2]
            own = terms[messages.rank]
            begun.append((memory.start(own, torch.add), own, wanted))
            if index % 3 == 2:  # several under way, the last one finished first
                for sum_, found, right in begun[::-1]:
                    memory.finish(sum_)
                    equal.append(torch.equal(found, right))
                begun.clear()
        return equal

    with _memories(size) as memories:
        assert together(memories, action) == [[True] * 6] * size


@pytest.mark.parametrize("direct", [False, True])
def test_sums_of_values_that_it_packs_itself(direct: bool) -> None:
    def action(rank: int) -> list[bool]:
        found = []
        for length in (100_000, 300_000, 70_001):
            terms = _terms(length, 2, torch.float32)
            total, pieces = torch.empty(0), torch.tensor_split(terms[rank], [1, length // 2])
            begun = memories[rank].start_packed(pieces, total)
            found.append(total.numel() == (length if direct else 0))  # else the buffer has it
            memories[rank].finish(begun)
            found.append(torch.equal(total, terms[0] + terms[1]))
        return found

    with _ranks(2) as messages:
        memories = [SharedMemory(one, 2, direct) for one in messages]
        assert [memory.direct for memory in memories] == [direct] * 2
        assert together([0, 1], action) == [[True] * 6] * 2
        for memory in memories:
            memory.close()


def test_buffers_are_used_again_and_given_back() -> None:
    def opened() -> int:
        return sum(
            "memfd:fxdp" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
        )

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:fxdp")

    def action(rank: tuple[Messages, SharedMemory]) -> None:
        for _ in range(7):
            rank[1].finish(rank[1].start(torch.ones(10_000), torch.add))

    before = opened(), mapped()
    with _memories(2) as memories:
        together(memories, action)
        # three buffers per rank, mapped by both; each mapping has a descriptor of its own
        assert (opened() - before[0], mapped() - before[1]) == (18, 12)
    del memories
    assert (opened(), mapped()) == before


def test_a_rank_that_leaves_ends_the_wait() -> None:
    with _memories(3) as memories:
        begun = [memory.start(torch.ones(8), torch.add) for _, memory in memories[:2]]
        memories[2][0].cut()
        for (_, memory), one in zip(memories[:2], begun, strict=True):
            with pytest.raises(LinkBrokenError, match="the connection to rank 2 was closed"):
                memory.finish(one)


def test_sums_that_have_come_apart_are_noticed() -> None:
    def action(rank: tuple[Messages, SharedMemory]) -> None:
        messages, memory = rank
        memory.finish(memory.start(torch.ones(8 + messages.rank), torch.add))

    words = r"rank 1 came to a sum with 36 bytes; expected 32|rank 0 came to a sum with 32 bytes; expected 36"
    with _memories(2) as memories, pytest.raises(RankFailedError, match=words):
        together(memories, action)


def _large() -> tuple[list[bool], bool, int]:
    """Real processes, the functional collectives: values that are too large for messages."""
    process_mesh = init_mesh(None, "cpu")
    ops, name, rank = torch.ops._c10d_functional, process_mesh.mesh.group("messages"), dist.get_rank()
    assert process_mesh.comms is not None
    before, equal = process_mesh.comms.transport.handed_bytes, []
    for dtype in (torch.float32, torch.float16, torch.complex128):
        terms = _terms(1_000_003, 3, dtype)
        found = ops.wait_tensor(ops.all_reduce(terms[rank], "sum", name))
        equal.append(torch.equal(found, (terms[0] + terms[1]) + terms[2]))
    return equal, process_mesh.mesh.shared_memory, process_mesh.comms.transport.handed_bytes - before


def test_functional_collectives_on_three_ranks(ranks: RankPool) -> None:
    assert ranks.run(3, _large) == [([True] * 3, True, 1_000_003 * (4 + 2 + 16))] * 3


def _probed() -> list[bool]:
    comms = init_mesh(None, "cpu").comms
    assert comms is not None
    everybody = range(dist.get_world_size())
    wishes = True, False, dist.get_rank() == 0
    return [host_places(comms.control, everybody, wanted).one for wanted in wishes]


def test_memory_is_shared_if_all_ranks_can_and_want_to(ranks: RankPool) -> None:
    assert ranks.run(3, _probed) == [[True, False, False]] * 3


def test_memory_cannot_shrink_under_its_readers() -> None:
    buffer = SharedBuffer.make(100, 1)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.descriptor, 10)
    os.close(buffer.descriptor)


def test_memory_that_could_shrink_or_is_too_small_is_refused() -> None:
    open_one = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_one, 100)
    with pytest.raises(OSError, match="it is not sealed"):
        open_buffer(WHERE.pack(os.getpid(), open_one, 1))
    os.close(open_one)
    small = SharedBuffer.make(8, 1)
    with _memories(2) as ((first, memory), (second, _)):
        begun = memory.start(torch.ones(1000), torch.add)
        second.start(memoryview(small.where + struct.pack("<Q", 4000)))
        with pytest.raises(LinkBrokenError, match="the memory of rank 1 is smaller than it says"):
            memory.finish(begun)
        first.cut()
    os.close(small.descriptor)


def test_no_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StateError, match=r"no room for 4096 bytes .*No space left.*FXDP_SHARED_MEMORY=0"):
        SharedBuffer.make(4096, 1)
