"""Why each value of a program is placed as it is, and why each collective exists."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxdp.capture.sites import Origin
from fxdp.ir import conversions
from fxdp.ir.graph_text import node_text
from fxdp.ir.notes import has_no_rule, is_host_size, note, tensor_operands
from fxdp.reports.plan_data.parameter_table import first_read
from fxdp.reports.rows import Explanation
from fxdp.rules.registry import registry


def explain(
    gm: fx.GraphModule, axes: Sequence[str], origin: Origin | None = None
) -> tuple[Explanation, ...]:
    """The nodes of an EXPLICIT program in order, without arithmetic on sizes.

    With an `origin` their lines are the user's own: where torch's modules run an op, the line behind them,
    and of a parameter or input the line that first reads it.
    """
    return tuple(_explanation(node, tuple(axes), origin) for node in gm.graph.nodes if _is_shown(node))


def _is_shown(node: fx.Node) -> bool:
    return node.op != "output" and not is_host_size(node) and note(node).placement is not None


def _explanation(node: fx.Node, axes: tuple[str, ...], origin: Origin | None) -> Explanation:
    known = note(node)
    site = known.cause.site if known.cause is not None else known.site
    if origin is not None:
        site = origin.of(site if node.op != "placeholder" else first_read(node))
    text = node_text(node, axes, causes=False)
    placed = known.placement[0] if isinstance(known.placement, tuple) else known.placement
    is_collective = node.target in conversions.COLLECTIVES
    return Explanation(node.name, text, _why(node), site, is_collective, str(placed or ""))


def _why(node: fx.Node) -> str:
    known = note(node)
    if node.op == "placeholder":
        return f"given so: {known.placement} for {known.reason or 'a constant'}"
    if node.target in conversions.CONVERSIONS:
        return _why_converted(node)
    if known.reason is None:
        return "placed without a rule"
    rule = registry.get(node.target)
    family = f" ({rule.family})" if rule is not None else ""
    name = "no rule: every operand whole" if has_no_rule(node) else f"rule {known.reason}{family}"
    reads = zip(tensor_operands(node), known.operands, strict=False)
    listed = ", ".join(f"%{source.name} as {wanted or 'it is'}" for source, wanted in reads)
    return f"{name}, reads {listed}" if listed else name


def _why_converted(node: fx.Node) -> str:
    known, source = note(node), node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is conversions.wait:
        return f"waits for %{source.name}"
    need = f"%{source.name} is {note(source).placement}, needed as {known.placement}"
    if known.cause is None:
        return need
    return f"{need} by {known.cause.text or known.cause.consumer}"
