"""Replace each op that works along a sharded dim by the ops of the decomposition which its rule chose."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.graphs import spread
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_operands
from fxdp.ir.types.decompositions import Decomposition, DecompositionStep, Rewrite, Term
from fxdp.ir.types.mesh import Mesh


def _expand(node: fx.Node, decomposition: Decomposition) -> None:
    """Insert the steps of a decomposition.

    The last step reuses the node itself, or the `getitem` of each result.
    """
    operands, name = tensor_operands(node), target_text(node.target)
    finals = _finals(node, decomposition)
    needed = _needed(decomposition, finals)
    made: dict[int, fx.Node] = {}

    def value(argument: Any) -> Any:
        if not isinstance(argument, Term):
            return argument
        return operands[argument.index] if argument.index >= 0 else made[argument.index]

    for number, step in enumerate(decomposition.steps, 1):
        if -number not in needed:
            continue
        args, kwargs = tuple(map(value, step.args)), dict(step.kwargs)
        target = finals.get(-number)
        if target is None:
            with node.graph.inserting_before(node):
                target = node.graph.call_function(step.target, args, kwargs)
            copy_meta(node, target, spec=None)
        # later steps, inserted before the node, may read this `getitem`, which comes after the node
        elif target is not node:
            node.prepend(target)
        target.target, target.args, target.kwargs = step.target, args, kwargs
        _describe(target, step, name)
        made[-number] = target
    if node not in finals.values():
        node.graph.erase_node(node)


def _finals(node: fx.Node, decomposition: Decomposition) -> dict[int, fx.Node]:
    """Map the number of each step that computes a result to the node that holds this result."""
    if not isinstance(meta(node).type, tuple):
        (result,) = decomposition.results
        assert result is not None
        return {result.index: node}
    found: dict[int, fx.Node] = {}
    for pick in list(node.users):
        assert pick.target is operator.getitem
        result = decomposition.results[pick.args[1]]  # type: ignore[index]
        assert result is not None
        if result.index in found:
            pick.replace_all_uses_with(found[result.index])
            node.graph.erase_node(pick)
        else:
            found[result.index] = pick
    return found


def _needed(decomposition: Decomposition, finals: Iterable[int]) -> set[int]:
    def read(index: int) -> list[int]:
        return [a.index for a in decomposition.steps[-index - 1].args if isinstance(a, Term) and a.index < 0]

    return spread((index for index in finals if index < 0), read)


def _describe(node: fx.Node, step: DecompositionStep, name: str) -> None:
    known = meta(node)
    known.type, known.placement, known.decomposition = step.type, step.at, None
    known.operands = tuple(a.at for a in step.args if isinstance(a, Term))
    known.rewrite = Rewrite()  # sizes among the arguments are the rank's: localization makes nodes of them
    known.rematerialized, known.decomposed_from = False, name


@dataclass(frozen=True)
class ExpandDecompositions:
    """Expand decompositions, so that no op works along a dim that is sharded.

    before: `%_log_softmax {dp=S(1)} = aten._log_softmax(%mm, 1, False)` with `%mm {dp=S(1)}`
    after:  `%amax {dp=P(max)} = fxdp.amax(%mm, [1], True)`, ..., `%_log_softmax = aten.sub(%sub, %log)`

    The rule that placed the op wrote the steps (`rules/builder.py`). Where a step needs the reduced value of
    a partial operand, `insert-collectives` inserts the reduction.
    """

    name = "expand-decompositions"
    requires = Level.PLACED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        for node in list(gm.graph.nodes):
            decomposition = meta(node).decomposition
            if decomposition is not None:
                _expand(node, decomposition)
        return gm
