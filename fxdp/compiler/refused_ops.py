"""Refusing a placed program: all ops that the user does not want, at once."""

from __future__ import annotations

from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir import conversions
from fxdp.ir.graph_text import target_text, type_text
from fxdp.ir.notes import has_no_rule, note, tensor_operands


def refuse_fallbacks(gm: fx.GraphModule) -> None:
    """Refuse ops without a placement rule in an EXPLICIT program (`strict=True`).

    Raises
    ------
    PlacementError : names each of them with its line, module, operands and their placements.
    """
    nodes = [node for node in gm.graph.nodes if has_no_rule(node)]
    if nodes:
        listing = "\n  ".join(map(_fallback_text, nodes))
        raise PlacementError(
            f"strict=True: {len(nodes)} ops have no placement rule and would run whole on every rank:\n"
            f"  {listing}\n"
            "Give them rules with fxdp.register_rule, or compile with strict=False: that is exact, but slower"
        )


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
