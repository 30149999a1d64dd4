from __future__ import annotations

from typing import Any

import pytest
import torch

from fxdp.errors import AgreementError, RankFailedError
from fxdp.ranks.agreement import Agreement, agree, broadcast_tensors, gather_objects
from fxdp.ranks.liveness.failure import guard, refusing
from fxdp.ranks.mesh_init import init_mesh
from tests.rank_pool import RankPool


def test_one_rank_needs_no_process_group() -> None:
    process_mesh = init_mesh(None, "cpu")
    assert Agreement(process_mesh).exchange([3, -4]) == [(3, -4)]
    assert gather_objects(process_mesh, "x") == ["x"]
    agree(process_mesh, ["a"], "models")
    broadcast_tensors(process_mesh, [torch.ones(2)])


def _exchange() -> list[Any]:
    process_mesh = init_mesh(None, "cpu")
    agreement = Agreement(process_mesh)
    results: list[Any] = [agreement.exchange([process_mesh.mesh.rank, 2**62, -1])]
    agreement.start([7] * process_mesh.mesh.rank)
    results.append(agreement.finish())
    results += [agreement.exchange([step]) for step in range(100)][-1:]
    big = gather_objects(process_mesh, bytes([process_mesh.mesh.rank]) * 5_000_000)
    results.append([(len(item), item[0]) for item in big])
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchange(ranks: RankPool, world_size: int) -> None:
    everyone = range(world_size)
    for result in ranks.run(world_size, _exchange):
        assert result[0] == [(rank, 2**62, -1) for rank in everyone]
        assert result[1] == [(7,) * rank for rank in everyone]
        assert result[2] == [(99,)] * world_size
        assert result[3] == [(5_000_000, rank) for rank in everyone]


def _disagree(cases: list[list[list[str]]]) -> list[str]:
    process_mesh = init_mesh(None, "cpu")
    messages = []
    for case in cases:
        try:
            agree(process_mesh, case[process_mesh.mesh.rank], "models")
            messages.append("agreed")
        except AgreementError as error:
            messages.append(str(error).splitlines()[0])
    return messages


def test_agree(ranks: RankPool) -> None:
    same = [["a", "b"]] * 4
    one_differs = [["a", "b"], ["a", "b"], ["a", "c"], ["a", "b"]]
    shorter = [["a", "b"], ["a", "b"], ["a"], ["a"]]
    expected = [
        "agreed",
        "ranks were given different models: line 2: ranks 0, 1, 3 have `b`; rank 2 has `c`",
        "ranks were given different models: line 2: ranks 0, 1 have `b`; ranks 2, 3 end before it",
    ]
    assert ranks.run(4, _disagree, [same, one_differs, shorter]) == [expected] * 4


def _tensors(rank: int) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(rank)
    storage = torch.randn(4, 6, generator=make)
    tied = torch.nn.Parameter(torch.randn(3, generator=make))
    return [
        storage.t()[1:3],
        tied,
        tied,
        torch.randn(2, 2, generator=make).to(torch.complex64),
        torch.randn(2, generator=make).to(torch.complex128).conj(),
        torch.randn(1, 6, generator=make)[:, 0],
        torch.tensor(rank % 2 == 0),
        torch.tensor([True, rank == 0, False]),
        torch.tensor(rank + 5),
        torch.randint(0, 100, (7,), generator=make, dtype=torch.int8),
        torch.randn(3, generator=make).to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.randn(5, generator=make, dtype=torch.float64),
        torch.randn(300, generator=make),
    ]


def _broadcast(bucket_bytes: int) -> bool:
    process_mesh = init_mesh(None, "cpu")
    mine, reference = _tensors(process_mesh.mesh.rank), _tensors(0)
    addresses = [tensor.data_ptr() for tensor in mine]
    broadcast_tensors(process_mesh, mine, bucket_bytes)
    assert addresses == [tensor.data_ptr() for tensor in mine]
    assert mine[1].requires_grad
    assert mine[1].grad_fn is None
    for got, expected in zip(mine, reference, strict=True):
        assert torch.equal(got, expected), (got, expected)
    versions = [tensor._version for tensor in mine]
    broadcast_tensors(process_mesh, mine, bucket_bytes)
    assert versions == [tensor._version for tensor in mine]
    return True


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_broadcast_tensors(ranks: RankPool, bucket_bytes: int) -> None:
    assert ranks.run(2, _broadcast, bucket_bytes) == [True, True]


def _call(agreement: Agreement, process_mesh: Any, batch: int) -> Any:
    """What a compiled module does at a call: checks, exchange, program."""
    with guard(process_mesh):
        with refusing(process_mesh):
            if batch < 0:
                raise ValueError(f"batch {batch} on rank {process_mesh.mesh.rank}")
        return sum(value for (value,) in agreement.exchange([batch]))


def _refuse() -> list[Any]:
    process_mesh = init_mesh(None, "cpu")
    agreement = Agreement(process_mesh)
    results = []
    for batches in ([1, 2], [1, -2], [3, 4], [-1, -2], [5, 6], [-7, 8], [-7, 8], [1, 1]):
        try:
            results.append(_call(agreement, process_mesh, batches[process_mesh.mesh.rank]))
        except (ValueError, RankFailedError) as error:
            results.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return results


def test_refused_input_fails_one_call_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(2, _refuse)
    theirs = "RefusedError: rank {} failed: ValueError: batch {} on rank {}"
    assert first == [
        3,
        theirs.format(1, -2, 1),
        7,
        "ValueError: batch -1 on rank 0",
        11,
        "ValueError: batch -7 on rank 0",
        "ValueError: batch -7 on rank 0",
        2,
    ]
    assert second == [
        3,
        "ValueError: batch -2 on rank 1",
        7,
        "ValueError: batch -2 on rank 1",
        11,
        theirs.format(0, -7, 0),
        theirs.format(0, -7, 0),
        2,
    ]
