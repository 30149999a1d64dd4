"""Ranks that wait for what others write into the store do so quietly, and look for failures meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.addresses import Addresses


def test_a_rank_that_waits_prints_nothing_and_looks_for_failures(capfd: pytest.CaptureFixture[str]) -> None:
    here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = dist.TCPStore("127.0.0.1", here.port, is_master=False, wait_for_workers=False)
    addresses = Addresses(there, "mesh", timeout_s=30)
    addresses.look_s = 0.2
    looks: list[float] = []
    writer = threading.Timer(0.7, lambda: here.set("key", "value"))
    writer.start()
    begin = time.monotonic()
    assert addresses.read(["key"], lambda: looks.append(time.monotonic()), lambda: None) == ["value"]
    assert 0.6 < time.monotonic() - begin < 10
    assert looks
    shown = capfd.readouterr()
    assert not shown.err, "warnings of torch's sockets"

    def failed() -> None:
        raise RankFailedError("rank 1 failed")

    with pytest.raises(RankFailedError, match="rank 1 failed"):
        addresses.read(["nothing"], failed, lambda: None)
