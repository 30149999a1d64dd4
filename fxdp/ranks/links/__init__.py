"""What joins the ranks of a mesh: process groups for tensors, and a control channel for everything else."""

from fxdp.ranks.links.channel import Channel, RefusedError
from fxdp.ranks.links.ending import Ending, EndKind, LateError, harmless, not_understood
from fxdp.ranks.links.interrupt import Interrupted
from fxdp.ranks.links.links import Links
from fxdp.ranks.links.live import find_links, live_links, speaking_links
from fxdp.ranks.links.notices import tell_everywhere
from fxdp.ranks.links.opening import add_group, open_links

__all__ = [
    "Channel",
    "EndKind",
    "Ending",
    "Interrupted",
    "LateError",
    "Links",
    "RefusedError",
    "add_group",
    "find_links",
    "harmless",
    "live_links",
    "not_understood",
    "open_links",
    "speaking_links",
    "tell_everywhere",
]
