"""Inductor writes the collectives of a program in the plan's order, on ranks of any sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import fxdp
from fxdp.compiler import lowered_parts
from fxdp.ir.ops.packed_sums import start_sum, start_sums
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.lowering.inductor.collective_order import collectives, order_lines, starts_collective
from fxdp.torch_compat import TorchDispatchMode
from tests.rank_pool import RankPool

Started = tuple[str, int | None]
"""A collective: its op, and how many numbers it gives; None where that is open."""
WAYS: Mapping[str, dict[str, Any]] = {
    "replicate": {"communication": {"bucket_cap_mb": 1e-3, "link_gbit": 1000.0}},
    "shard": {"strategy": "shard"},
}


class _Starts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each collective that starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Started] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (start_sum, start_sums) or starts_collective(fx.Graph().call_function(func)):
            self.seen.append((_kind(func), result.numel()))
        return result


def _kind(op: Any) -> str:
    name: str = op._opname.rstrip("_")
    return "all_reduce" if op in (start_sum, start_sums) else name


def _planned(gm: fx.GraphModule) -> list[Started]:
    nodes = {node.name: node for node in gm.graph.nodes}
    found = []
    for node in map(nodes.__getitem__, collectives(gm.graph)):
        count = node.meta["val"].numel()
        found.append((_kind(node.target), count if isinstance(count, int) else None))
    return found


def _same(seen: list[Started], planned: list[Started]) -> bool:
    pairs = zip(seen, planned, strict=True) if len(seen) == len(planned) else [(("", 0), ("-", 0))]
    return all(one[0] == other[0] and other[1] in (None, one[1]) for one, other in pairs)


def _two_swapped(nodes: list[Any]) -> list[Any]:
    """A pass of Inductor's that starts a sum after the next one of another size, if that needs it not."""
    starts = [n for n in nodes if "fxdp.start_sum" in str(getattr(n.node, "op_overload", ""))]
    for first, second in pairwise(starts):
        begin, end = nodes.index(first), nodes.index(second)
        made = {b.get_name() for b in first.get_outputs()}
        others = first.node.get_numel() != second.node.get_numel()
        between = nodes[begin + 1 : end + 1]
        if others and not any(made & {read.name for read in n.read_writes.reads} for n in between):
            return [*nodes[:begin], *nodes[begin + 1 : end + 1], first, *nodes[end + 1 :]]
    return nodes


@contextmanager
def _swapping() -> Iterator[None]:
    import torch._inductor.config as config

    with config.patch(_post_fusion_custom_pass=_two_swapped, fx_graph_cache=False):
        yield


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 12),
        nn.Tanh(), nn.Linear(12, 4),
    )  # fmt: skip


def _step(way: str, swapped: bool) -> list[tuple[list[Started], list[Started]]]:
    """What started in the forward and in the backward, and what the plan has there."""
    pair: list[ForwardBackward] = []

    def noted(one: ForwardBackward) -> list[str]:
        pair.append(one)
        return order_lines(one)

    within: Callable[[], Any] = _swapping if swapped else nullcontext
    with mock.patch.object(lowered_parts, "order_lines", noted), within():
        compiled = fxdp.compile(_net(), **WAYS[way])
        x = torch.randn([5, 3][dist.get_rank()], 8)
        seen: list[list[Started]] = []

        def run(what: Callable[[], Any]) -> Any:
            with _Starts() as starts:
                result = what()
            seen.append(starts.seen)
            return result

        compiled(x).square().sum().backward()  # the ranks agree, and measure their link
        loss: Tensor = run(lambda: compiled(x).square().sum())
        run(loss.backward)
    last = next(one for one in reversed(pair) if one.backward_graph is not None)
    graphs = (last.forward_graph, last.backward_graph)
    return [(s, _planned(gm)) for s, gm in zip(seen, graphs, strict=True) if gm is not None]


@pytest.mark.parametrize("way", WAYS)
def test_collectives_start_in_the_order_of_the_plan_on_uneven_ranks(ranks: RankPool, way: str) -> None:
    found = ranks.run(2, _step, way, False)
    for pair in found:
        assert sum(len(planned) for _, planned in pair) >= 3
        for seen, planned in pair:
            assert _same(seen, planned), f"started {seen}, planned {planned}"
    kinds = [[[kind for kind, _ in seen] for seen, _ in pair] for pair in found]
    assert kinds[0] == kinds[1]


def test_a_pass_that_swaps_collectives_is_seen(ranks: RankPool) -> None:
    for pair in ranks.run(2, _step, "replicate", True):
        assert not all(_same(seen, planned) for seen, planned in pair), pair
