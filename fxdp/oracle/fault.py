"""A difference found by the oracle: the node, the rule, and the state of the operands."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxdp.ir.graph.graph_text import node_text
from fxdp.ir.graph.metadata import Location, meta, tensor_operands
from fxdp.ir.types.value_types import TensorType


@dataclass(frozen=True, slots=True)
class _OperandState:
    """An operand of a faulty node.

    `text` is the operand's line in golden text, `wanted` the placement that the node needs, and `error` the
    relative difference from one device (None for inputs, parameters, and values without a counterpart).
    """

    text: str
    wanted: str
    error: float | None

    def __str__(self) -> str:
        state = "as given" if self.error is None else f"off by {self.error:.1g}"
        return f"{self.text}   read as {self.wanted}, {state}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A node for which the values of the ranks do not combine to the global value.

    `error` is relative to the largest value, and infinite if the values cannot be compared.
    """

    node: str
    text: str
    what: str
    rule: str
    location: Location
    placement: str = ""
    operands: tuple[_OperandState, ...] = ()
    error: float = float("inf")

    def __str__(self) -> str:
        lines = [self.text, f"    {self.what}", f"    rule {self.rule}, from {self.location}"]
        return "\n".join([*lines, *(f"    operand {operand}" for operand in self.operands)])


def make_fault(node: fx.Node, what: str, error: float, errors: dict[fx.Node, float]) -> Fault:
    """Build the fault of a node; `errors` are the errors of earlier nodes."""
    known = meta(node)
    operands = _operands(node, errors)
    rule = known.reason or "?"
    text = node_text(node, ("dp",))
    return Fault(node.name, text, what, rule, known.location, _placement(known.placement), operands, error)


def _placement(placement: object) -> str:
    return ", ".join(map(str, placement)) if isinstance(placement, tuple) else str(placement)


def _operands(node: fx.Node, errors: dict[fx.Node, float]) -> tuple[_OperandState, ...]:
    sources = tensor_operands(node)
    if not sources:  # a `getitem` reads a tuple
        sources = [n for n in node.all_input_nodes if isinstance(meta(n).type, tuple)]
    wanted = meta(node).operands or (None,) * len(sources)
    if len(wanted) != len(sources):
        return ()
    return tuple(
        _OperandState(node_text(s, ("dp",), causes=False), _wanted(s, w), errors.get(s))
        for s, w in zip(sources, wanted, strict=True)
    )


def _wanted(source: fx.Node, wanted: object) -> str:
    if wanted is not None:
        return str(wanted)
    return "it is" if isinstance(meta(source).type, TensorType) else "a tuple"
