"""Pictures for the HTML page as SVG in the page's colors: memory over a step, and the map of stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment

from fxdp.pipeline.schedule.transfers import Edge
from fxdp.reports.plan_data.memory_curve import RankMemory
from fxdp.reports.rows import StageRow, format_bytes

_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_WIDTH, _HEIGHT, _LEFT = 720, 150, 76

_MEMORY = _ENVIRONMENT.from_string(
    """\
<svg viewBox="0 0 {{ width }} {{ height + 34 }}" role="img" aria-label="memory over the step">
<text x="{{ left - 6 }}" y="{{ still_y + 4 }}" text-anchor="end">{{ still }}</text>
{% for area in areas %}
<path d="{{ area.path }}" class="{{ area.phase }}"><title>{{ area.phase }}</title></path>
{% endfor %}
<line x1="{{ left }}" y1="{{ still_y }}" x2="{{ width }}" y2="{{ still_y }}" class="faint" \
stroke-dasharray="4 4"/>
<circle cx="{{ x }}" cy="{{ y }}" r="4" class="peak"><title>{{ at }}</title></circle>
<text x="{{ left - 6 }}" y="{{ y + 4 }}" text-anchor="end">{{ peak }}</text>
<text x="{{ left }}" y="{{ height + 28 }}">the step begins</text>
<text x="{{ width }}" y="{{ height + 28 }}" text-anchor="end">and ends</text>
</svg>"""
)

_STAGES = _ENVIRONMENT.from_string(
    """\
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="stages and what they send" \
style="max-width:{{ width }}px">
{% for arc in arcs %}
<path d="{{ arc.path }}" class="{{ arc.kind }}"><title>{{ arc.name }}</title></path>
{% endfor %}
{% for box in boxes %}
<g><title>{{ box.title }}</title>
<rect x="{{ box.x }}" y="{{ top }}" width="132" height="64" rx="6" class="box"/>
<text x="{{ box.x + 66 }}" y="{{ top + 20 }}" text-anchor="middle" class="strong">stage {{ box.stage }}</text>
<text x="{{ box.x + 66 }}" y="{{ top + 37 }}" text-anchor="middle">{{ box.begins }}</text>
<text x="{{ box.x + 66 }}" y="{{ top + 54 }}" text-anchor="middle">rank {{ box.rank }}, \
{{ box.share }} %</text>
</g>
{% endfor %}
</svg>"""
)


@dataclass(frozen=True, slots=True)
class _Area:
    phase: str
    path: str


def memory_svg(memory: RankMemory) -> str:
    """Draw the memory of a rank from op to op: forward and backward in two tones, with the peak marked."""
    points, peak = memory.points, memory.peak
    still = memory.still
    if not points or not peak.bytes:
        return ""
    step = (_WIDTH - _LEFT) / len(points)

    def y(size: int) -> float:
        return round(10 + _HEIGHT * (1 - size / peak.bytes), 1)

    areas, first = [], 0
    for phase, run in itertools.groupby(point.phase for point in points):
        last = first + len(list(run))
        top = " ".join(
            f"{round(_LEFT + (i + end) * step, 1)},{y(points[i].bytes)}"
            for i in range(first, last)
            for end in (0, 1)
        )
        ends = round(_LEFT + first * step, 1), round(_LEFT + last * step, 1)
        areas.append(_Area(phase, f"M{ends[0]},{10 + _HEIGHT} L{top} L{ends[1]},{10 + _HEIGHT} Z"))
        first = last
    place = next(i for i, point in enumerate(points) if point == peak)
    return _MEMORY.render(
        width=_WIDTH, height=_HEIGHT, left=_LEFT, areas=areas, still=format_bytes(still), still_y=y(still),
        x=round(_LEFT + (place + 0.5) * step, 1), y=y(peak.bytes), at=peak.at, peak=format_bytes(peak.bytes),
    )  # fmt: skip


def stages_svg(stages: Sequence[StageRow], edges: Sequence[Edge]) -> str:
    """Draw stages as boxes in a row: forward edges above (longer edges higher), gradient edges below."""
    gap, width = 172, 172 * len(stages)
    farthest = max((abs(e.target - e.source) for e in edges), default=1)
    top = 24 + 18 * farthest
    boxes = [
        {
            "x": 8 + gap * row.stage,
            "stage": row.stage,
            "begins": _short(row.begins or "the model"),
            "rank": row.rank,
            "share": round(100 * row.share),
            "title": f"begins in {row.begins or 'the model itself'}; parameters "
            f"{format_bytes(row.parameter_bytes)}; sends {format_bytes(row.sent)} per step",
        }
        for row in stages
    ]
    arcs = [_arc(edge, gap, top) for edge in edges]
    return _STAGES.render(width=width, height=2 * top + 64, top=top, boxes=boxes, arcs=arcs)


def _arc(edge: Edge, gap: int, top: int) -> dict[str, str]:
    far = abs(edge.target - edge.source)
    start, end = 8 + 66 + gap * edge.source, 8 + 66 + gap * edge.target
    level, top = (top + 64, top + 64 + 14 + 18 * far) if edge.backward else (top, top - 14 - 18 * far)
    kind = "backward-edge" if edge.backward else "skip-edge" if far > 1 else "forward-edge"
    words = "gradient" if edge.backward else "skip" if far > 1 else "value"
    path = f"M{start},{level} C{start},{top} {end},{top} {end},{level}"
    return {"path": path, "kind": kind, "name": f"{words} {edge.name}: stage {edge.source} to {edge.target}"}


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"
