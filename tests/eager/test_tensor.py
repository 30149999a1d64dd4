"""What a global tensor shows, and what it refuses, in one process and on ranks."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxdp
from tests.rank_pool import RankPool


def _batch() -> fxdp.GlobalTensor:
    found = fxdp.global_batch(torch.arange(12.0).view(4, 3))
    assert isinstance(found, fxdp.GlobalTensor)
    return found


def test_it_reads_as_the_tensor_of_one_device() -> None:
    x = _batch()
    assert (x.size(0), len(x), x.shape, x.stride()) == (4, 4, (4, 3), (3, 1))
    assert x.placements == (fxdp.S(0),)
    assert x.local_sizes == (4,)
    assert x.sum().item() == 66.0
    assert f"{x.mean():.1f}" == "5.5"
    assert bool((x > 10).any())
    assert x[1].tolist() == [3.0, 4.0, 5.0]
    assert np.array_equal(x.numpy(), np.arange(12.0).reshape(4, 3))
    assert np.array_equal(np.asarray(x), x.numpy())
    assert "GlobalTensor(shape=(4, 3), S(0) of (4,)" in repr(x)
    assert x.untyped_storage().nbytes() == x.numpy().nbytes <= sys.getsizeof(x.untyped_storage())
    copied = copy.deepcopy(x)
    copied[0] = 7
    assert x[0, 0].item() == 0.0
    saved = pickle.loads(pickle.dumps(x))
    assert type(saved) is Tensor
    assert torch.equal(saved, x.full())


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "data_ptr": (lambda x: x.data_ptr(), "data_ptr"),
    "data_ptr of the class": (torch.Tensor.data_ptr, "data_ptr"),
    "storage of the class": (lambda x: torch.Tensor.untyped_storage(x).data_ptr(), "storage"),
    "storage": (lambda x: x.untyped_storage().data_ptr(), "storage"),
    "storage of a view": (lambda x: x.t().untyped_storage(), "storage"),
    "typed storage": (lambda x: x.storage(), "storage"),
    "dlpack": (np.from_dlpack, "exported by DLPack"),
    "resize_": (lambda x: x.resize_(2, 2), "resize_|x = x.resize"),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(0)), "leave out= away"),
}


def test_a_tensor_of_numbers_of_global_tensors() -> None:
    x = _batch()
    made = torch.tensor([x.sum(), x.max() * 2])
    assert made.tolist() == [66.0, 22.0]
    assert torch.tensor([[x.argmax()], [x.long().min()]]).tolist() == [[11], [0]]
    with pytest.raises((TypeError, ValueError, RuntimeError), match="element"):
        torch.tensor([x, 1.0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_memory_is_refused_with_the_remedy(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(fxdp.InputError, match=words):
        call(_batch())


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x * 2], ids=["batch", "result"])
def test_a_pointer_read_in_c_is_an_error(of: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(of(_batch()))  # type: ignore[attr-defined]


def test_a_write_into_a_conjugate_is_one_into_its_base() -> None:
    plain = torch.complex(torch.arange(12.0).reshape(4, 3), torch.ones(4, 3))
    x = _batch() + 1j
    for one in (plain, x):
        one.conj().mul_(2 + 1j)
        one.conj()[1].zero_()
    assert torch.equal(x.full(), plain)  # type: ignore[attr-defined]


def _shown_on_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    x = fxdp.global_batch(torch.full((rank * 2, 3), float(rank)))
    wide = (x.t() @ torch.ones(len(x), 2000)).sum(0)
    loss = x.mean()
    alone = loss.item() if rank == 1 else None  # by one rank alone: nothing is sent
    return {
        "shape": tuple(x.shape), "local": tuple(x.local.shape), "sizes": x.local_sizes, "alone": alone,
        "wide": str(wide.placements[0]), "sum": float(wide.full().sum()), "full": x.full().tolist(),
    }  # fmt: skip


def test_a_part_on_each_rank(ranks: RankPool) -> None:
    found = ranks.run(3, _shown_on_ranks)
    full = [[1.0] * 3] * 2 + [[2.0] * 3] * 4
    for rank, shown in enumerate(found):
        assert shown["shape"] == (6, 3)
        assert shown["local"] == (2 * rank, 3)
        assert shown["sizes"] == (0, 2, 4)
        assert shown["full"] == full
        assert shown["wide"] == "P(sum)"
        assert shown["sum"] == 2000 * 30.0
    assert found[1]["alone"] == pytest.approx(10 / 6)


def _two_meshes() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = fxdp.global_batch(torch.ones(2, 3), whole)
    y = fxdp.global_batch(torch.ones(2, 3), {"dp": 1}) if dist.get_rank() > 5 else _alone()
    try:
        x + y
    except fxdp.InputError as error:
        return str(error)
    return ""


def _alone() -> Any:
    from fxdp.eager.data_ranks import DataRanks
    from fxdp.eager.tensor import wrapped
    from fxdp.ir.types.mesh import mesh_of
    from fxdp.ranks.process_mesh import ProcessMesh

    ranks = DataRanks(ProcessMesh(mesh_of({"dp": 1}, "cpu")))
    return wrapped(torch.ones(4, 3), ranks.axis((4,)), fxdp.S(0))


def test_tensors_of_two_meshes_are_refused(ranks: RankPool) -> None:
    for words in ranks.run(2, _two_meshes):
        assert "global tensors of two meshes" in words
        assert words.count("test_tensor.py:") == 3
