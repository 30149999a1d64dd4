"""Functional collectives by messages between real ranks."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.distributed as dist

from fxdp.ir.ops.packed_sums import finish_sums, start_sum, start_sums
from fxdp.ranks.mesh_init import init_mesh
from tests.rank_pool import RankPool

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8,
)  # fmt: skip
_SHAPES = ((), (3,), (2, 0), (5, 7))


def _terms(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Every rank's term: of very different sizes, so that the order of the sum shows in the last bits."""
    scale = (1000, 7, 1, 300) if dtype.is_floating_point or dtype.is_complex else (1, 2, 3, 4)
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * s).to(dtype) for s in scale]


def _collectives() -> list[bool]:
    process_mesh = init_mesh(None, "cpu")
    ops, name, rank = torch.ops._c10d_functional, process_mesh.mesh.group("messages"), dist.get_rank()
    equal = []
    for dtype in _DTYPES:
        for shape in _SHAPES:
            terms = _terms(dtype, shape)
            wanted = ((terms[0] + terms[1]) + terms[2]) + terms[3]
            early = ops.all_reduce(terms[rank], "sum", name)
            gathered = ops.all_gather_into_tensor(terms[rank].reshape(1, *shape), 4, name)
            equal.append(torch.equal(ops.wait_tensor(gathered), torch.stack(terms)))
            equal.append(torch.equal(ops.wait_tensor(early), wanted))
    for op, extreme in (("max", 4), ("min", 1)):
        found = ops.wait_tensor(ops.all_reduce(torch.tensor([rank + 1, 4 - rank]), op, name))
        equal.append(torch.equal(found, torch.tensor([extreme] * 2)))
    return equal


def test_sums_in_rank_order_and_gathers_on_four_ranks(ranks: RankPool) -> None:
    """To the last bit: all ranks add in the same order, so their results cannot differ."""
    found = ranks.run(4, _collectives)
    assert found == [[True] * (2 * len(_DTYPES) * len(_SHAPES) + 2)] * 4


def _packed_sums() -> list[tuple[bool, int]]:
    """Sums of several values at once, small ones and large ones, several under way."""
    process_mesh = init_mesh(None, "cpu")
    assert process_mesh.comms is not None
    mesh, rank, found = process_mesh.mesh, dist.get_rank(), []
    before = process_mesh.comms.transport.handed_bytes
    for group in (mesh.group("messages"), mesh.group()):
        begun = []
        for length in (3, 100_000, 70_001):
            terms = _terms(torch.float32, (length,))[: mesh.size]
            cuts = [0, 1, length // 2, length - 1]
            begun.append((start_sum(list(torch.tensor_split(terms[rank], cuts)), group), terms))
        for value, terms in begun:
            full = torch.ops._c10d_functional.wait_tensor(value)
            wanted = reduce(torch.add, terms)
            exact = group == mesh.group("messages")  # gloo adds in another order
            right = torch.equal(full, wanted) if exact else full.allclose(wanted, atol=1e-2)
            found.append((right, process_mesh.comms.transport.handed_bytes - before))
            before = process_mesh.comms.transport.handed_bytes
    # of no line there is none to pack: a matrix keeps its shape, and dtypes become one as `cat` has it
    mixed = [torch.ones(2, 3), torch.ones(1, 3, dtype=torch.float64)]
    summed = torch.ops._c10d_functional.wait_tensor(start_sum(mixed, mesh.group("messages")))
    found.append((torch.equal(summed, torch.full((3, 3), mesh.size, dtype=torch.float64)), summed.nbytes))
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_values_are_packed_where_they_are_summed(ranks: RankPool, count: int) -> None:
    handed = [4 * (3 + 100_000 + 70_001), 0, 0, 0, 0, 0]
    assert ranks.run(count, _packed_sums) == [[(True, size) for size in (*handed, 72)]] * count


def _counted() -> tuple[int, int, int, int]:
    process_mesh = init_mesh(None, "cpu")
    assert process_mesh.comms is not None
    before = process_mesh.comms.messages.rounds, process_mesh.comms.transport.handed_bytes
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce(torch.ones(10), "sum", process_mesh.mesh.group("messages")))
    ops.wait_tensor(ops.all_reduce(torch.ones(10), "sum", process_mesh.mesh.group()))
    return (*before, process_mesh.comms.messages.rounds, process_mesh.comms.transport.handed_bytes)


def test_what_is_handed_over_is_counted(ranks: RankPool) -> None:
    for rounds, handed, rounds_after, handed_after in ranks.run(2, _counted):
        assert (rounds_after - rounds, handed_after - handed) == (1, 40)


def _rows(length: int) -> list[bool]:
    """Gathers and scatters of few and of many elements, all started before one is waited for."""
    process_mesh = init_mesh(None, "cpu")
    ops, name, rank = torch.ops._c10d_functional, process_mesh.mesh.group("messages"), dist.get_rank()
    equal, terms = [], _terms(torch.float64, (4, length))
    for _ in range(3):
        gathered = ops.all_gather_into_tensor(terms[rank][0].contiguous(), 4, name)
        scattered = ops.reduce_scatter_tensor(terms[rank].reshape(-1), "sum", 4, name)
        total = ops.all_reduce(terms[rank], "sum", name)
        wanted = ((terms[0] + terms[1]) + terms[2]) + terms[3]
        equal.append(torch.equal(ops.wait_tensor(total), wanted))
        equal.append(torch.equal(ops.wait_tensor(scattered), wanted[rank]))
        equal.append(torch.equal(ops.wait_tensor(gathered), torch.cat([term[0] for term in terms])))
    return equal


def test_rows_go_by_messages_and_through_memory(ranks: RankPool) -> None:
    for length in (3, 20_000):
        assert ranks.run(4, _rows, length) == [[True] * 9] * 4


def _sums_in_place() -> list[tuple[bool, bool]]:
    """Small ones and large ones, several under way, waited for in another order."""
    process_mesh = init_mesh(None, "cpu")
    mesh, rank, begun = process_mesh.mesh, dist.get_rank(), []
    for dtype, cuts in ((torch.float32, [1, 40_000]), (torch.float64, [0, 70_001]), (torch.int64, [2])):
        for length in (100_000, 5):
            terms = _terms(dtype, (length,))[: mesh.size]
            own = [part.clone().view(1, -1) for part in torch.tensor_split(terms[rank], cuts)]
            addresses = [part.data_ptr() for part in own]
            begun.append((start_sums(own, mesh.group("messages")), own, addresses, terms, cuts))
    found = []
    for token, own, addresses, terms, cuts in begun[::-1]:
        sums = finish_sums(token)
        wanted = torch.tensor_split(reduce(torch.add, terms), cuts)
        same = all(torch.equal(s.view(-1), w) for s, w in zip(sums, wanted, strict=True))
        found.append((same, [s.data_ptr() for s in sums] == addresses == [o.data_ptr() for o in own]))
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_values_are_summed_where_they_lie(ranks: RankPool, count: int) -> None:
    assert ranks.run(count, _sums_in_place) == [[(True, True)] * 6] * count
