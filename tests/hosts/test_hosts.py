"""Ranks on several hosts: how they find each other, by which addresses, and what they hear of a lost one.

Two starts of ranks for all tests, each under torchrun on every host (tests/hosts/training.py):

    three    3 hosts with a rank each, IPv6 only; the last one's link is slow, and goes down in the end
    two      2 hosts with two ranks each, which know themselves as 127.0.1.1, as on Debian; a rank is killed
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.hosts.machines import Machines, machines, why_not
from tests.hosts.training import STEPS, batch, make
from tests.limits import HANG_S, SOON_S, scaled

_ROOT = Path(__file__).resolve().parents[2]
_TRAINING = (
    "from tests.garbage import collect_seldom; collect_seldom(); "  # before what takes seconds to import
    "import sys; from tests.hosts.training import main; main(*sys.argv[1:])"
)
_LOST_S = scaled(4.0)

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no hosts: {why_not()}"),
    pytest.mark.xdist_group("hosts"),
]


class _Run:
    """What the ranks of one start wrote, and the news of its end."""

    def __init__(self, made: Machines, each: int, folder: Path) -> None:
        self.machines = made
        self.each = each
        self.folder = folder
        self.world = made.count * each
        self.ended = 0.0

    def start(self, *options: str) -> list[dict[str, Any]]:
        places = ",".join(str(self.machines.place(host)) for host in range(self.machines.count))
        endpoint = f"{self.machines.name(0)}:29400"
        command = [
            sys.executable, "-c", _TRAINING, places, str(self.each), endpoint, str(self.folder), *options,
        ]  # fmt: skip
        self.machines.start(
            command, self.folder / "output", PYTHONPATH=str(_ROOT), OMP_NUM_THREADS="1",
            FXDP_TIMEOUT_S=str(HANG_S), FXDP_LOST_S=str(_LOST_S), FXDP_CACHE="0",
        )  # fmt: skip
        return [json.loads(text) for text in self._written("json", HANG_S)]

    def news(self, ranks: Sequence[int], limit_s: float) -> dict[int, tuple[float, str]]:
        """What these ranks heard, and after how many seconds."""
        told = self._written("end", limit_s, ranks)
        read = [json.loads(text) for text in told]
        return {rank: (at - self.ended, text) for rank, (at, text) in zip(ranks, read, strict=True)}

    def _written(self, departure: str, limit_s: float, ranks: Sequence[int] = ()) -> list[str]:
        files = [self.folder / f"{rank}.{departure}" for rank in ranks or range(self.world)]
        end = time.monotonic() + limit_s
        while not all(file.exists() and file.stat().st_size for file in files):
            if time.monotonic() > end or (departure == "json" and self.machines.failed):
                said = [file.read_text(errors="replace")[-3000:] for file in self.folder.glob("output*")]
                pytest.fail(f"no {departure} of all ranks within {limit_s:g} s:\n" + "\n".join(said))
            time.sleep(0.05)
        return [file.read_text() for file in files]


_Started = tuple[_Run, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Started]:
    with machines(3, mbit=500, ipv6=True) as made:
        made.slow_down(2, 50)
        run = _Run(made, 1, tmp_path_factory.mktemp("three"))
        yield run, run.start()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Started]:
    with machines(2, mbit=100, known_as="127.0.1.1") as made:
        run = _Run(made, 2, tmp_path_factory.mktemp("two"))
        yield run, run.start("stages", "sharded", "summed")


def _alone() -> list[float]:
    """The losses of one device."""
    model, (x, y) = make(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _check(run: _Run, found: list[dict[str, Any]]) -> None:
    """The curve is that of one device, and all addresses are those of the hosts' network."""
    expected = _alone()
    for rank, seen in enumerate(found):
        assert seen["losses"] == pytest.approx(expected, rel=1e-9)
        others = [other for other in range(run.world) if other != rank]
        assert seen["control"] == sorted(run.machines.address(other // run.each) for other in others)
        assert set(seen["gloo"]) == {run.machines.address(host) for host in range(run.machines.count)}
        assert not seen["memory"]


def test_three_hosts_with_ipv6_only(three: _Started) -> None:
    _check(*three)


def test_hosts_of_one_rank_each_sum_by_gloo(three: _Started) -> None:
    assert all(set(seen["transports"]) <= {"gloo", "messages"} for seen in three[1])


def test_what_is_less_to_send_over_the_measured_link_is_gathered(three: _Started, two: _Started) -> None:
    """Of 11 samples the factors of the layer of 64 x 128."""
    for seen in three[1]:
        assert seen["gathered"] == ["factors of gradient of 3.weight"]
    assert all(seen["gathered"] == [] for seen in two[1])


def test_all_know_how_fast_the_slowest_link_is(three: _Started) -> None:
    costs = {seen["seconds per byte"] for seen in three[1]}
    assert len(costs) == 1
    assert costs.pop() > 0.5 * 8 / 50e6  # of 50 Mbit/s; the other links have 500


def test_a_host_that_vanishes_is_named_on_all_others(three: _Started) -> None:
    run, _ = three
    run.ended = time.time()
    run.machines.vanish(2)
    for rank, (seconds, text) in run.news(range(3), HANG_S).items():
        assert seconds < SOON_S
        lost = f"rank 2 (host {run.machines.name(2)}) does not answer any more: its machine, or the network"
        assert rank == 2 or text.startswith(lost), text


def test_hosts_that_know_themselves_as_loopback(two: _Started) -> None:
    _check(*two)


def test_rows_of_parameters_lie_on_several_hosts(two: _Started) -> None:
    for seen in two[1]:
        assert seen["sharded"].keys() == {"over all", "left to a host", "of a host"}
        for losses in seen["sharded"].values():
            assert losses == pytest.approx(_alone(), rel=1e-9)


def test_memory_is_shared_by_those_who_share_it(two: _Started) -> None:
    """Two of four ranks are on each host: not between all four, but by two, and within stages of one host."""
    assert [seen["memory"] for seen in two[1]] == [False] * 4
    assert all(
        "memory and gloo" in seen["transports"] and "gloo" not in seen["transports"] for seen in two[1]
    )
    assert [seen["memory of a stage"] for seen in two[1]] == [True] * 4


def test_a_killed_rank_of_another_host_is_named(two: _Started) -> None:
    run, seen = two
    run.ended = time.time()
    run.machines.kill(1, seen[3]["process"])
    for seconds, text in run.news([0, 1, 2], HANG_S).values():
        assert seconds < SOON_S
        assert text.startswith(f"rank 3 (host {run.machines.name(1)}) ended without an error message"), text
