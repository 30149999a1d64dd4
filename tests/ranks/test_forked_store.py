"""A store of forks: no thread of it is there when they are made, and who comes early waits."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import fxdp
from fxdp.ranks.forked_store import ForkedStore
from fxdp.torch_compat import TCPStore


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_threads_start_with_serving_and_earlier_connections_wait() -> None:
    before = _threads()
    store = ForkedStore()
    assert _threads() <= before
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(TCPStore, "127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        store.serve()
        client.result().set("key", "value")
        assert client.result().get("key") == b"value"


def _world_size() -> int:
    return dist.get_world_size()


def test_ranks_are_forked_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    forks, plain = list[int](), ForkedStore.serve

    def serve(store: ForkedStore) -> None:
        forks.append(len(multiprocessing.active_children()))
        plain(store)

    monkeypatch.setattr(ForkedStore, "serve", serve)
    before = len(multiprocessing.active_children())
    assert fxdp.launch(_world_size, nproc=2) == [2, 2]
    assert forks == [before + 2]
