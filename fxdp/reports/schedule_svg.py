"""Draw a schedule: one row per rank, one box per action on a time axis, transfers as lines.

The picture is one SVG text without scripts, fonts or links; pointing at a box shows its full name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from jinja2 import Environment

from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs, Interval, Timeline
from fxdp.pipeline.schedule.transfers import Edge
from fxdp.reports.schedule_text import schedule_text

_COLOURS = {
    Kind.FORWARD: ("#4c8bf5", "forward"),
    Kind.BACKWARD: ("#3c9d5b", "backward"),
    Kind.INPUT_GRADIENT: ("#3c9d5b", "gradient of inputs"),
    Kind.WEIGHT_GRADIENT: ("#e0a030", "gradient of weights"),
}
_LEFT, _TOP, _ROW, _BOX, _SMALLEST = 64, 52, 36, 26, 22

_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}" \
viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif" font-size="11">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="8" y="18" font-size="14" font-weight="bold" fill="#222222">{{ title }}</text>
{% for item in legend %}
<rect x="{{ item.x }}" y="28" width="11" height="11" fill="{{ item.colour }}"/>
<text x="{{ item.x + 15 }}" y="38" fill="#222222">{{ item.text }}</text>
{% endfor %}
{% for row in rows %}
<text x="8" y="{{ row.y + 17 }}" fill="#222222">rank {{ row.rank }}</text>
<rect x="{{ left }}" y="{{ row.y }}" width="{{ width - left - 8 }}" height="{{ box }}" fill="#f0f0f0"/>
{% endfor %}
{% for b in boxes %}
<g><title>{{ b.name }}</title><rect x="{{ b.x }}" y="{{ b.y }}" width="{{ b.width }}" height="{{ box }}" \
fill="{{ b.colour }}" fill-opacity="{{ b.opacity }}" stroke="#ffffff"/>\
<text x="{{ b.middle }}" y="{{ b.y + 17 }}" text-anchor="middle" fill="#000000">{{ b.text }}</text></g>
{% endfor %}
{% for line in lines %}
<path d="M{{ line.x1 }} {{ line.y1 }} L{{ line.x2 }} {{ line.y2 }}" stroke="{{ line.colour }}" \
stroke-opacity="0.6" fill="none"><title>{{ line.name }}</title></path>
{% endfor %}
</svg>
"""
)


@dataclass(frozen=True, slots=True)
class _Box:
    """An action as a box: position in pixels and label."""

    name: str
    text: str
    colour: str
    opacity: float
    x: float
    y: int
    width: float

    @property
    def middle(self) -> float:
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True, slots=True)
class _Line:
    """A transfer as a line, from the end of the producing action to the start of the consuming action."""

    name: str
    colour: str
    x1: float
    y1: int
    x2: float
    y2: int


@dataclass(frozen=True, repr=False)
class DrawnSchedule(Schedule):
    """A schedule with its transfers, displayed as a picture in a notebook and as text elsewhere."""

    edges: tuple[Edge, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, edges: Sequence[Edge] = ()) -> DrawnSchedule:
        """Add `edges` to a schedule."""
        given = {field.name: getattr(schedule, field.name) for field in fields(Schedule)}
        return cls(**given, edges=tuple(edges))

    def __repr__(self) -> str:
        return f"Schedule({_title(self, self.timeline())})"

    def __str__(self) -> str:
        return schedule_text(self)

    def _repr_svg_(self) -> str:
        return schedule_svg(self, edges=self.edges)


def schedule_svg(schedule: Schedule, costs: Costs | None = None, edges: Sequence[Edge] = ()) -> str:
    """Draw a schedule under the given costs, with the bubble in the title; `edges` become lines.

    The width of a box is the duration, and its label is the micro-batch; later stages of a rank are paler.
    """
    line = schedule.timeline(costs)
    shortest = min((s.finish - s.start for s in line.intervals if s.finish > s.start), default=1.0)
    scale = min(_SMALLEST / shortest, 40 * len(line.intervals) / (line.span or 1.0))
    kinds = {interval.action.kind for interval in line.intervals}
    legend = [kind for kind in Kind if kind in kinds]
    boxes = {interval.action: _box(interval, schedule, scale) for interval in line.intervals}
    return _TEMPLATE.render(
        width=max(round(_LEFT + line.span * scale + 8), 520),
        height=_TOP + _ROW * line.ranks,
        title=_title(schedule, line),
        left=_LEFT,
        box=_BOX,
        legend=[
            {"x": _LEFT + 140 * i, "colour": _COLOURS[kind][0], "text": f"{kind} {_COLOURS[kind][1]}"}
            for i, kind in enumerate(legend)
        ],
        rows=[{"rank": rank, "y": _TOP + _ROW * rank} for rank in range(line.ranks)],
        boxes=list(boxes.values()),
        lines=[line for edge in edges for line in _lines(edge, schedule, boxes)],
    )


def _title(schedule: Schedule, line: Timeline) -> str:
    return (
        f"{schedule.name}: {schedule.stages} stages on {line.ranks} ranks, "
        f"{schedule.microbatches} micro-batches, bubble {100 * line.bubble:.1f} %"
    )


def _box(interval: Interval, schedule: Schedule, scale: float) -> _Box:
    action = interval.action
    mates = [s for s, rank in enumerate(schedule.placement) if rank == interval.rank]
    colour, meaning = _COLOURS[action.kind]
    return _Box(
        name=f"{action}: {meaning} of stage {action.stage}, micro-batch {action.microbatch}",
        text=str(action.microbatch),
        colour=colour,
        opacity=round(1 - 0.6 * mates.index(action.stage) / len(mates), 2),
        x=round(_LEFT + interval.start * scale, 1),
        y=_TOP + _ROW * interval.rank,
        width=round((interval.finish - interval.start) * scale, 1),
    )


def _lines(edge: Edge, schedule: Schedule, boxes: dict[Action, _Box]) -> list[_Line]:
    """Return one line per micro-batch for an edge between two ranks; edges used once per step have none."""
    if edge.once or schedule.placement[edge.source] == schedule.placement[edge.target]:
        return []
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT) if edge.backward else (Kind.FORWARD,)
    found = []
    for microbatch in range(schedule.microbatches):
        ends = [
            next((boxes[a] for kind in kinds if (a := Action(stage, kind, microbatch)) in boxes), None)
            for stage in (edge.source, edge.target)
        ]
        if ends[0] and ends[1]:
            found.append(_line(f"{edge} mb{microbatch}", edge.backward, ends[0], ends[1]))
    return found


def _line(name: str, backward: bool, source: _Box, target: _Box) -> _Line:
    down = target.y > source.y
    colour = "#1e5c33" if backward else "#1d3f80"
    left, right = source.x + source.width, target.x
    return _Line(
        name, colour, round(left, 1), source.y + _BOX * down, round(right, 1), target.y + _BOX * (not down)
    )
