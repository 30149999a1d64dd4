"""Refusing a placed program: all ops that the user does not want, at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxdp.errors import InputError, PlacementError
from fxdp.ir import conversions
from fxdp.ir.draws import node_draws
from fxdp.ir.graph_text import target_text, type_text
from fxdp.ir.memory_layout import UNCLEAR, Arrangement
from fxdp.ir.notes import note, tensor_operands
from fxdp.ir.slots import Input


def refuse_fallbacks(gm: fx.GraphModule) -> None:
    """Refuse ops without a placement rule in an EXPLICIT program (`strict=True`).

    Raises
    ------
    PlacementError : names each of them with its line, module, operands and their placements.
    """
    nodes = [node for node in gm.graph.nodes if _is_fallback(node)]
    if nodes:
        listing = "\n  ".join(map(_fallback_text, nodes))
        raise PlacementError(
            f"strict=True: {len(nodes)} ops have no placement rule and would run whole on every rank:\n"
            f"  {listing}\n"
            "Give them rules with fxdp.register_rule, or compile with strict=False: that is exact, but slower"
        )


def refuse_unclear_draws(gm: fx.GraphModule, orders: Sequence[Arrangement]) -> None:
    """Refuse random numbers that one device would lay down in an order that the inputs do not tell.

    Raises
    ------
    InputError : names the first line that draws them, and the input.
    """
    reached: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        slot = note(node).slot
        if isinstance(slot, Input) and orders[slot.index] == UNCLEAR:
            reached[node] = slot.path
        path = next((reached[n] for n in node.all_input_nodes if n in reached), None)
        if path is not None:
            reached[node] = path
            if node_draws(node):
                raise InputError(
                    f'{note(node).site}: rng="single-device" draws in the order of the memory of the input '
                    f"{path}, but this overlaps itself, or its dims follow each other in another order on "
                    f"another rank. Pass {path}.contiguous()"
                )


def _is_fallback(node: fx.Node) -> bool:
    reason = note(node).reason
    return node.op == "call_function" and reason is not None and reason.rule == "unknown"


def _fallback_text(node: fx.Node) -> str:
    operands = ", ".join(_operand_text(_origin(source)) for source in tensor_operands(node))
    return f"{target_text(node.target)} at {note(node).site}\n    operands: {operands or 'none'}"


def _origin(node: fx.Node) -> fx.Node:
    """The value before it was gathered or reduced for the op."""
    while node.target in conversions.CONVERSIONS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _operand_text(node: fx.Node) -> str:
    return f"%{node.name}: {type_text(note(node).type)} {{{note(node).placement}}}"
