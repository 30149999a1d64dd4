from __future__ import annotations

import pytest
from torch import nn

from fxdp.skip import Namespace, SkipLayout, inspect_skip_layout

from .modules import declares


def policies(layout: SkipLayout) -> list[list[tuple[int, object, str]]]:
    return [list(layout.copy_policy(j)) for j in range(len(layout.by_partition))]


def test_no_skips() -> None:
    layout = inspect_skip_layout([nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())])
    assert policies(layout) == [[], []]
    assert layout.by_ns_name == {}


def test_within_a_partition_nothing_is_copied() -> None:
    layout = inspect_skip_layout([nn.Sequential(declares(stash=["a"]), declares(pop=["a"]))])
    assert layout.by_ns_name == {(None, "a"): (0, 0)}
    assert layout.by_partition == [[(0, None, "a")]]
    assert policies(layout) == [[]]
    assert not layout.requires_copy(None, "a")


def test_adjacent_and_across() -> None:
    parts = [
        nn.Sequential(declares(stash=["a"]), declares(stash=["b"])),
        nn.Sequential(declares(pop=["b"])),
        nn.Sequential(nn.Identity()),
        nn.Sequential(declares(pop=["a"])),
    ]
    layout = inspect_skip_layout(parts)
    assert policies(layout) == [[], [(0, None, "b")], [], [(0, None, "a")]]
    assert layout.requires_copy(None, "a")
    assert not layout.requires_copy(None, "unknown")


def test_copies_come_from_the_first_source_on() -> None:
    parts = [declares(stash=["z"]), declares(stash=["b", "a"]), declares(pop=["a", "b", "z"])]
    layout = inspect_skip_layout([nn.Sequential(part) for part in parts])
    assert policies(layout)[2] == [(0, None, "z"), (1, None, "a"), (1, None, "b")]


def test_namespaces_of_all_kinds_sort() -> None:
    one, two = Namespace(), Namespace()
    spaces = (two, None, one)
    parts = [
        nn.Sequential(*(declares(stash=["a"]).isolate(ns) for ns in spaces)),
        nn.Sequential(*(declares(pop=["a"]).isolate(ns) for ns in spaces)),
    ]
    layout = inspect_skip_layout(parts)
    assert policies(layout) == [[], [(0, None, "a"), (0, one, "a"), (0, two, "a")]]


def test_nested_skippables_and_single_modules() -> None:
    deep = nn.Sequential(nn.ModuleList([nn.ModuleDict({"x": declares(stash=["a"])})]))
    assert inspect_skip_layout([deep, declares(pop=["a"])]).by_ns_name == {(None, "a"): (0, 1)}


def test_a_name_used_again_after_its_pop() -> None:
    give, take = declares(stash=["a"]), declares(pop=["a"])
    layout = inspect_skip_layout([nn.Sequential(give, take), nn.Sequential(give), nn.Sequential(take)])
    assert layout.by_ns_name == {(None, "a"): (1, 2)}


def test_pops_without_stash_are_listed() -> None:
    with pytest.raises(TypeError) as caught:
        inspect_skip_layout([nn.Sequential(declares(pop=["a"])), declares(pop=["b"])])
    assert "* '0' of partition 0 declared 'a' as poppable but it was not stashed" in str(caught.value)
    assert "of partition 1 declared 'b'" in str(caught.value)


def test_by_hand() -> None:
    layout = SkipLayout(num_partitions=3, skip_routes={(None, "a"): (1, 2), (None, "b"): (0, 2)})
    assert layout.by_partition == [[], [], [(0, None, "b"), (1, None, "a")]]
