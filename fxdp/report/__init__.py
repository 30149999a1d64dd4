"""What a person reads of a plan: tables as text, curves as pictures."""

from fxdp.report.curves import can_draw, draw_curves
from fxdp.report.schedule_svg import schedule_svg
from fxdp.report.schedule_text import schedule_text, timetable
from fxdp.report.text import (
    CommunicationRow,
    StageRow,
    communication_table,
    format_bytes,
    format_seconds,
    stage_table,
    timings_line,
)

__all__ = [
    "CommunicationRow",
    "StageRow",
    "can_draw",
    "communication_table",
    "draw_curves",
    "format_bytes",
    "format_seconds",
    "schedule_svg",
    "schedule_text",
    "stage_table",
    "timetable",
    "timings_line",
]
