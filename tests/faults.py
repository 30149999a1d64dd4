"""Faults to seed into rules and passes: each makes a compiler that is wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.graph.signature import Size
from fxdp.passes.insert_collectives import InsertCollectives
from fxdp.passes.localize_shapes import LocalizeShapes
from fxdp.rules.registry import Alternative, Op, RegisteredRule, registry

Seed = Callable[[pytest.MonkeyPatch], None]
"""Makes the compiler wrong until the test ends."""


def rule(target: Any, change: Callable[[Op, Alternative], Alternative]) -> Seed:
    """Every alternative that the op's rule offers is changed."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        right = registry[target]
        wrong = RegisteredRule(right.name, right.family, lambda op: [change(op, a) for a in right.rule(op)])
        patch.setitem(registry._rules, target, wrong)

    return seed


def extra(target: Any, offer: Callable[[Op], Alternative]) -> Seed:
    """The op's rule offers one more alternative, which is not exact."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        right = registry[target]
        wrong = RegisteredRule(right.name, right.family, lambda op: [*right.rule(op), offer(op)])
        patch.setitem(registry._rules, target, wrong)

    return seed


def after(pass_: type, change: Callable[[fx.GraphModule], None]) -> Seed:
    """A pass leaves a graph that is changed in one place."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        right = pass_.run  # type: ignore[attr-defined]

        def run(self: Any, gm: fx.GraphModule, mesh: Any) -> fx.GraphModule:
            found: fx.GraphModule = right(self, gm, mesh)
            change(found)
            return found

        patch.setattr(pass_, "run", run)

    return seed


def outputs(*placements: Any) -> Callable[[Op, Alternative], Alternative]:
    """The alternative with other placements of its results."""
    return lambda op, a: replace(a, outputs=placements)


def without_rewrite(op: Op, alternative: Alternative) -> Alternative:
    """The alternative whose arguments are not localized as they must be."""
    return replace(alternative, rewrite=None)


def averaging(gm: fx.GraphModule) -> None:
    """The first all-reduce takes the mean of the ranks' terms."""
    node = _first(gm, redistributions.all_reduce)
    node.args = (node.args[0], "avg")


def reducing_twice(gm: fx.GraphModule) -> None:
    """The result of the first all-reduce is reduced once more."""
    (done,) = _first(gm, redistributions.all_reduce).users
    users = list(done.users)
    with gm.graph.inserting_after(done):
        again = gm.graph.call_function(redistributions.all_reduce, (done, "sum"))
    with gm.graph.inserting_after(again):
        twice = gm.graph.call_function(redistributions.wait, (again,))
    known = meta(done.args[0])  # type: ignore[arg-type]
    copy_meta(done, again, cause=known.cause, operands=(meta(done).placement,))
    copy_meta(done, twice)
    for user in users:
        user.replace_input_with(done, twice)


def gathering_in_the_wrong_order(gm: fx.GraphModule) -> None:
    """A gather of interleaved parts puts them behind one another."""
    node = next(n for n in gm.graph.nodes if n.target is redistributions.all_gather and n.args[2] != 1)
    value, dim, outer, inner = node.args
    node.args = (value, dim, 1, outer * inner)  # type: ignore[operator]


def keeping_each_term(gm: fx.GraphModule) -> None:
    """The first all-reduce is left out: every rank goes on with its own term."""
    node = _first(gm, redistributions.all_reduce)
    (done,) = node.users
    source = node.args[0]
    done.replace_all_uses_with(source)  # type: ignore[arg-type]
    gm.graph.erase_node(done)
    gm.graph.erase_node(node)


def dividing_by_the_local_batch(gm: fx.GraphModule) -> None:
    """The divisor of the first mean counts the rank's own samples."""
    sizes = {meta(n).spec: n for n in gm.graph.nodes}
    node = next(n for n in gm.graph.nodes if _divides(n, sizes[Size("B")]))
    node.replace_input_with(sizes[Size("B")], sizes[Size("b")])


def _divides(node: fx.Node, batch: fx.Node) -> bool:
    return str(node.target) == "aten.div.Tensor" and batch in node.all_input_nodes


def _first(gm: fx.GraphModule, target: Any) -> fx.Node:
    return gm.graph.find_nodes(op="call_function", target=target)[0]


AFTER_INSERTION, AFTER_LOCALIZATION = InsertCollectives, LocalizeShapes
