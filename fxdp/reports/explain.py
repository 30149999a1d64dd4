"""Explain the placement of each value in a program, and the reason for each collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import node_text
from fxdp.ir.graph.metadata import has_no_rule, is_host_size, meta, tensor_operands
from fxdp.reports.plan_data.parameter_table import first_read
from fxdp.reports.rows import Explanation
from fxdp.rules.registry import registry


def explain(gm: fx.GraphModule, axes: Sequence[str], origin: Origin | None = None) -> tuple[Explanation, ...]:
    """Return one explanation per node of an EXPLICIT program, in order, without arithmetic on sizes.

    With an `origin`, the locations are in the user's own code: the calling line for an op inside torch's
    modules, and the first reading line for a parameter or an input.
    """
    return tuple(_explanation(node, tuple(axes), origin) for node in gm.graph.nodes if _is_displayed(node))


def _is_displayed(node: fx.Node) -> bool:
    return node.op != "output" and not is_host_size(node) and meta(node).placement is not None


def _explanation(node: fx.Node, axes: tuple[str, ...], origin: Origin | None) -> Explanation:
    known = meta(node)
    location = known.cause.location if known.cause is not None else known.location
    if origin is not None:
        location = origin.of(location if node.op != "placeholder" else first_read(node))
    text = node_text(node, axes, causes=False)
    placed = known.placement[0] if isinstance(known.placement, tuple) else known.placement
    is_collective = node.target in redistributions.COLLECTIVES
    return Explanation(node.name, text, _why(node), location, is_collective, str(placed or ""))


def _why(node: fx.Node) -> str:
    known = meta(node)
    if node.op == "placeholder":
        return f"given so: {known.placement} for {known.reason or 'a constant'}"
    if node.target in redistributions.REDISTRIBUTIONS:
        return _why_redistributed(node)
    if known.reason is None:
        return "placed without a rule"
    rule = registry.get(node.target)
    family = f" ({rule.family})" if rule is not None else ""
    name = "no rule: every operand entire" if has_no_rule(node) else f"rule {known.reason}{family}"
    reads = zip(tensor_operands(node), known.operands, strict=False)
    listed = ", ".join(f"%{source.name} as {wanted or 'it is'}" for source, wanted in reads)
    return f"{name}, reads {listed}" if listed else name


def _why_redistributed(node: fx.Node) -> str:
    known, source = meta(node), node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is redistributions.wait:
        return f"waits for %{source.name}"
    need = f"%{source.name} is {meta(source).placement}, needed as {known.placement}"
    if known.cause is None:
        return need
    return f"{need} by {known.cause.text or known.cause.consumer}"
