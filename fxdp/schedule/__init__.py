"""Pipeline schedules as pure functions: who does what in which order, and the proof that nobody blocks."""

from fxdp.schedule.action import Action, Kind
from fxdp.schedule.deadlock import check, reorder
from fxdp.schedule.registry import SCHEDULES, make
from fxdp.schedule.schedule import Schedule
from fxdp.schedule.timeline import Costs, Slot, Timeline
from fxdp.schedule.transfers import Edge, End, Event, Programs, Transfer, programs

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Edge",
    "End",
    "Event",
    "Kind",
    "Programs",
    "Schedule",
    "Slot",
    "Timeline",
    "Transfer",
    "check",
    "make",
    "programs",
    "reorder",
]
