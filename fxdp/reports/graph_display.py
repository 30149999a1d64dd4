"""Display graphs in a notebook as a table of nodes, colored by placement."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment
from torch import fx

from fxdp.ir.graph.graph_text import node_text, type_text
from fxdp.ir.graph.metadata import meta
from fxdp.reports.places import place

COLOURS = {"shard": "#0072b2", "partial": "#d55e00", "replicate": "#767676"}
"""Colors of Okabe and Ito, which color-blind readers can tell apart; grey stands for replicated."""

_LARGEST = 2000  # the most rows in a notebook; a larger table would be unreadable

_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """\
<div style="font:12px ui-monospace,monospace;max-height:36em;overflow:auto">
<p style="font:13px system-ui,sans-serif"><b>{{ title }}</b>
{% for name, colour in colours.items() if coloured %}
<span style="color:{{ colour }}">&#9632; {{ name }}</span>
{% endfor %}</p>
<table style="border-collapse:collapse;text-align:left">
{% for row in rows %}
<tr><td style="border-left:4px solid {{ row.colour }};padding:0 8px;white-space:nowrap">{{ row.name }}</td>
<td style="padding-right:8px;white-space:nowrap">{{ row.type }}</td>
<td style="padding-right:8px;white-space:nowrap">{{ row.placement }}</td>
<td style="padding-right:8px">{{ row.call }}</td><td style="white-space:nowrap">{{ row.at }}</td></tr>
{% endfor %}
</table>{{ more }}</div>
"""
)


def symbol_of(placement: str) -> str:
    """Return the kind of a placement by its text: shard (`S(0)`, `ParamShard`), partial or replicate."""
    if placement.startswith("ParamShard"):
        return "shard"
    return {"S": "shard", "P": "partial", "R": "replicate", "w": "replicate"}.get(placement[:1], "")


def displayed(gm: fx.GraphModule, title: str) -> fx.GraphModule:
    """Give a graph module a one-line `repr` and a table for notebooks; return the same module."""
    kind = type(gm)
    if kind is fx.GraphModule:  # not torch's own class per graph: a change here would affect all graphs
        return gm
    count = len(gm.graph.nodes)
    kind.__repr__ = lambda self: f"{title}: {count} nodes; print_readable() shows its code"  # type: ignore[method-assign]
    kind._repr_html_ = lambda self: _html(self, title)  # type: ignore[attr-defined]
    return gm


def _html(gm: fx.GraphModule, title: str) -> str:
    nodes = list(gm.graph.nodes)
    rows = [_row(node) for node in nodes[:_LARGEST]]
    more = f"and {len(nodes) - _LARGEST} more nodes" if len(nodes) > _LARGEST else ""
    coloured = any(row["placement"] for row in rows)
    return _TEMPLATE.render(title=title, rows=rows, more=more, colours=COLOURS, coloured=coloured)


def _row(node: fx.Node) -> dict[str, Any]:
    known = meta(node)
    location = known.cause.location if known.cause is not None else known.location
    call = node_text(node).partition(" = ")[2] if node.op in ("placeholder", "call_function") else ""
    return {
        "name": node.name,
        "type": type_text(known.type) if known.type is not None else "",
        "placement": ", ".join(str(p) for p in known.placements if p is not None),
        "colour": COLOURS.get(symbol_of(str(next(iter(known.placements), ""))), "transparent"),
        "call": call or node.format_node() or "",
        "at": place(location) if location.file else "",
    }
