"""Any number of ranks on any hosts are one tree of few connections."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.ranks.tree.tree_shape import ARITY, TreePlace, tree_places


def _depths(places: list[TreePlace]) -> list[int]:
    depths = []
    for rank in range(len(places)):
        depth, above = 0, places[rank].parent
        while above is not None:
            depth, above = depth + 1, places[above].parent
        depths.append(depth)
    return depths


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=90), st.integers(1, ARITY))
def test_every_rank_has_one_parent_and_few_children(hosts: list[str], arity: int) -> None:
    places = tree_places(hosts, arity)
    size, arity = len(hosts), max(arity, 2) if len(set(hosts)) > 1 else arity
    assert [rank for rank, place in enumerate(places) if place.parent is None] == [0]
    assert sorted(child for place in places for child in place.children) == list(range(1, size))
    for rank, place in enumerate(places):
        assert place.size == size
        assert len(place.children) <= arity
        assert all(places[child].parent == rank for child in place.children)
        assert place.counts == tuple(1 + sum(places[child].counts) for child in place.children)
    assert sorted(places[0].order) == list(range(size))
    assert sum(places[0].counts) == size - 1
    across = sum(p.parent is not None and hosts[p.parent] != hosts[r] for r, p in enumerate(places))
    assert across == len(set(hosts)) - 1, "each host but the first has one connection to another above it"
    assert max(_depths(places)) < size


def test_a_thousand_hosts() -> None:
    places = tree_places([f"host {rank // 8}" for rank in range(8192)])
    assert max(len(place.children) + 1 for place in places) == 17
    assert max(_depths(places)) == 5
    assert places[0].order[:3] == (0, 1, 2)
