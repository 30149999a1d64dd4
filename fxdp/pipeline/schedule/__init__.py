"""Pipeline schedules as pure functions: who does what in which order, and the proof that nobody blocks."""

from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.catalogue import SCHEDULES, make
from fxdp.pipeline.schedule.deadlock import check
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs, Slot, Timeline
from fxdp.pipeline.schedule.transfers import Edge, End, Event, Programs, Transfer, programs

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
]
