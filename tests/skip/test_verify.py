"""verify_skippables: its texts, which users of torchgpipe know, and what it sees beyond."""

from __future__ import annotations

import pytest
from torch import nn

from fxdp.skip import Namespace, verify_skippables

from .modules import declares


def faults(*layers: nn.Module) -> list[str]:
    """The bullets of the error."""
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers))
    head, blank, *bullets = str(caught.value).split("\n")
    assert head == "one or more pairs of stash and pop do not match:"
    assert blank == ""
    return bullets


def test_matching_pairs() -> None:
    verify_skippables(nn.Sequential(declares(stash=["a", "b"]), declares(pop=["b"]), declares(pop=["a"])))


def test_stash_and_pop_in_one_module() -> None:
    assert faults(declares(stash=["a"], pop=["a"])) == [
        "* '0' declared 'a' both as stashable and as poppable"
    ]


def test_redeclared() -> None:
    assert faults(declares(stash=["a"]), declares(stash=["a"]), declares(pop=["a"])) == [
        "* '1' redeclared 'a' as stashable but not isolated by namespace"
    ]
    assert faults(declares(stash=["a"]), declares(pop=["a"]), declares(pop=["a"])) == [
        "* '2' redeclared 'a' as poppable but not isolated by namespace"
    ]
    assert faults(
        *[declares(stash=["a"]), declares(pop=["a"])] * 1, declares(stash=["a"]), declares(pop=["a"])
    ) == [
        "* '2' redeclared 'a' as stashable but not isolated by namespace",
        "* '3' redeclared 'a' as poppable but not isolated by namespace",
    ]


def test_isolated_pairs_match() -> None:
    one, two = Namespace(), Namespace()
    pairs = [(declares(stash=["a"]).isolate(ns), declares(pop=["a"]).isolate(ns)) for ns in (one, two, None)]
    verify_skippables(nn.Sequential(*[layer for pair in pairs for layer in pair]))
    verify_skippables(nn.Sequential(*[a for a, _ in pairs], *[b for _, b in pairs]))


def test_pop_unknown_and_pop_before_stash() -> None:
    assert faults(declares(pop=["a"])) == ["* '0' declared 'a' as poppable but it was not stashed"]
    assert faults(declares(pop=["a"]), declares(stash=["a"])) == [
        "* '0' declared 'a' as poppable but it was not stashed",
        "* no module declared 'a' as poppable but stashed",
    ]


def test_stash_missing_and_another_namespace() -> None:
    assert faults(declares(stash=["b", "a"])) == [
        "* no module declared 'a' as poppable but stashed",
        "* no module declared 'b' as poppable but stashed",
    ]
    assert faults(declares(stash=["a"]), declares(pop=["a"]).isolate(Namespace())) == [
        "* '1' declared 'a' as poppable but it was not stashed",
        "* no module declared 'a' as poppable but stashed",
    ]


def test_nested_at_any_depth() -> None:
    inner = nn.Sequential(nn.Sequential(declares(stash=["a"])), nn.ModuleDict({"up": declares(pop=["b"])}))
    assert faults(inner, declares(pop=["a"])) == [
        "* '0.1.up' declared 'b' as poppable but it was not stashed"
    ]


class Unordered(nn.Module):
    """Runs its children in another order than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = declares(pop=["a"])
        self.down = declares(stash=["a"])


def test_where_the_order_is_unknown_a_pop_needs_a_stash_only() -> None:
    verify_skippables(nn.Sequential(Unordered()))
    verify_skippables(Unordered())
    assert faults(Unordered(), Unordered()) == [
        "* '1.down' redeclared 'a' as stashable but not isolated by namespace",
        "* '1.up' redeclared 'a' as poppable but not isolated by namespace",
    ]


def test_a_sequential_with_a_forward_of_its_own_has_no_known_order() -> None:
    class Backwards(nn.Sequential):
        def forward(self, x: object) -> object:
            for child in reversed(self):
                x = child(x)
            return x

    verify_skippables(Backwards(declares(pop=["a"]), declares(stash=["a"])))


def test_a_module_that_stands_twice_is_declared_once() -> None:
    give, take = declares(stash=["a"]), declares(pop=["a"])
    verify_skippables(nn.Sequential(give, take, give, take))
