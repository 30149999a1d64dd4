"""Halves run their collectives in the joint graph's order."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxdp
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.lowering.inductor.collective_order import collectives, order_lines, put_in_order
from tests.rank_pool import RankPool

_c10d = torch.ops._c10d_functional


def _half(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first = _c10d.wait_tensor.default(_c10d.all_reduce.default(torch.neg(x), "sum", "group"))
    second = _c10d.wait_tensor.default(_c10d.all_reduce.default(torch.exp(y), "sum", "group"))
    third = _c10d.wait_tensor.default(_c10d.all_gather_into_tensor.default(second + y, 2, "group"))
    return first, second, third


def test_collectives_go_after_what_they_need_in_the_order_that_is_wanted() -> None:
    gm = fx.symbolic_trace(_half)
    names = collectives(gm.graph)
    assert len(names) == 3
    before = [node.name for node in gm.graph.nodes]
    put_in_order(gm, names)
    assert [node.name for node in gm.graph.nodes] == before
    second, third, first = [*names[1:], names[0]]
    put_in_order(gm, ["of another half", second, third, first])
    assert collectives(gm.graph) == [second, third, first]
    assert sorted(node.name for node in gm.graph.nodes) == sorted(before)
    assert gm.graph.output_node() == list(gm.graph.nodes)[-1]


def test_the_order_as_text() -> None:
    gm = fx.symbolic_trace(_half)
    names = collectives(gm.graph)
    lines = order_lines(ForwardBackward(lambda _: [], 3, gm, gm))
    assert lines == [f"{half}: {name}" for half in ("forward", "backward") for name in names]


def _order_of_a_backward() -> tuple[list[str], bool]:
    """The starts and waits of sums as a step runs them, through gloo; and whether the link has a price."""
    os.environ["FXDP_SHARED_MEMORY"] = "0"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    try:
        # over a link so quick that of two samples gradients are summed nevertheless
        compiled = fxdp.compile(
            nn.Sequential(*layers), communication={"bucket_cap_mb": 64 * 65 * 4 / 2**20, "link_gbit": 1000.0}
        )
        x = torch.ones(2, 64)
        compiled(x).square().sum().backward()
        loss = compiled(x).square().sum()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds, acc_events=True) as seen:
            loss.backward()
    finally:
        del os.environ["FXDP_SHARED_MEMORY"]
    link = compiled._process_mesh.mesh.link
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    # under a profiler torch tells of an op that a dispatch mode looks at twice, one inside of the other
    own = [event for event in events if "_functional::" in event.name and not _is_inside(event)]
    names = [event.name.rpartition("::")[2] for event in own]
    return names, link is not None and 0 < link.latency < 10 and 0 < link.per_byte < 1e-3


def _is_inside(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None and parent.name != event.name:
        parent = parent.cpu_parent
    return parent is not None


def test_sums_start_when_their_gradients_are_made_and_are_waited_for_at_the_end(ranks: RankPool) -> None:
    ranks.renew()  # links that share memory live as long as their process group
    for names, priced in ranks.run(2, _order_of_a_backward):
        assert names == ["all_reduce_"] * 4 + ["wait_tensor"] * 4
        assert priced
    ranks.renew()
