"""Communication between the ranks of a mesh: process groups for tensors, a control channel for all else."""

from fxdp.ranks.comms.channel import Channel, RefusedError
from fxdp.ranks.comms.comms import Comms
from fxdp.ranks.comms.live import find_comms, live_comms, speaking_comms
from fxdp.ranks.comms.opening import add_group, open_comms
from fxdp.ranks.liveness.departure import Departure, DepartureKind, LateError, harmless, not_understood
from fxdp.ranks.liveness.failure_broadcast import broadcast_everywhere
from fxdp.ranks.liveness.interrupt import Interrupted

__all__ = [
    "Channel",
    "Comms",
    "Departure",
    "DepartureKind",
    "Interrupted",
    "LateError",
    "RefusedError",
    "add_group",
    "broadcast_everywhere",
    "find_comms",
    "harmless",
    "live_comms",
    "not_understood",
    "open_comms",
    "speaking_comms",
]
