"""`torch.distributed` as one device sees it: every function's answer, for one thread and a limited time."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import get_rank as own_rank
from torch.distributed import nn as differentiable

from fxdp.errors import StateError
from fxdp.torch_compat import one_device, patched


def test_collectives_are_those_of_one_rank() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    room = [torch.zeros(2, 3)]
    with patched(one_device()):
        assert (dist.get_world_size(), dist.get_rank(), own_rank(), dist.is_initialized()) == (1, 0, 0, False)
        assert dist.get_process_group_ranks(None) == [0]
        for group in (None, object()):
            assert dist.all_reduce(x, group=group) is None
        assert dist.all_reduce(x, async_op=True).wait()
        assert dist.all_gather(room, x) is None
        assert torch.equal(room[0], x)
        assert not room[0].requires_grad  # as torch's: those of torch.distributed.nn have gradients
        for gather in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
            out = torch.zeros(6).view(2, 3)
            gather(out, x)
            assert torch.equal(out, x)
        out = torch.zeros(2, 3)
        dist.reduce_scatter(out, [x])
        assert torch.equal(out, x)
        dist.scatter(out, [x * 2])
        assert torch.equal(out, x * 2)
        dist.gather(x, room, dst=0)
        objects = [None]
        dist.all_gather_object(objects, {"a": 1})
        assert objects == [{"a": 1}]
        dist.broadcast_object_list(objects, 0)
        dist.barrier()
        assert differentiable.functional.all_reduce(x) is x
        assert differentiable.functional.all_gather(x) == (x,)
        assert functional.all_reduce(x, "sum", "a group") is x
        assert functional.all_gather_tensor(x, 0, "a group") is x


def test_another_thread_and_later_calls_are_torchs() -> None:
    with patched(one_device()), ThreadPoolExecutor(1) as pool:
        other = pool.submit(dist.get_world_size)
        assert isinstance(other.exception(), ValueError), "torch's: the process group is not initialized"
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.get_world_size()


def test_what_takes_another_rank_is_refused() -> None:
    x = torch.zeros(3)
    with patched(one_device()):
        with pytest.raises(StateError, match="isend was called by code that sees one device"):
            dist.isend(x, 1)
        with pytest.raises(StateError, match="a list of 2, expected 1"):
            dist.all_gather([x, x], x)
        with pytest.raises(StateError, match="room for 6 elements, expected 3"):
            dist.all_gather_into_tensor(torch.zeros(6), x)


def test_what_a_module_binds_later_is_one_devices_too() -> None:
    """An installed module gets one name more, and a user's gives one of its names another value."""
    installed, own = ModuleType("installed"), ModuleType("own")
    installed.__file__, own.rank = json.__file__, None  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, installed=installed, own=own):
        with patched(one_device()):
            pass
        installed.late = own.rank = dist.get_rank  # type: ignore[attr-defined]
        with patched(one_device()):
            assert (installed.late(), own.rank()) == (0, 0)  # type: ignore[attr-defined]
            with patched(one_device()):
                assert (installed.late(), own.rank()) == (0, 0)  # type: ignore[attr-defined]
        assert (installed.late, own.rank) == (dist.get_rank,) * 2  # type: ignore[attr-defined]
