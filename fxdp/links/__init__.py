"""What joins the ranks of a mesh: process groups for tensors, and a control channel for everything else.

rendezvous.py   one TCP connection between every two ranks
control.py      short messages over them: integers, refusals, a rank's last words
messages.py     one more connection between every two ranks, for small tensors
memory.py       memory that the ranks of one host share, for large sums
group.py        both as a process group, so that functional collectives use them
sockets.py      the connections that gloo opened, so that they can be cut
links.py        all of these for one mesh, with a watch over the other ranks
opening.py      making them
"""

from fxdp.links.control import Control, Ending, EndKind, RefusedError
from fxdp.links.links import Links, find_links, live_links
from fxdp.links.messages import fits_messages
from fxdp.links.opening import open_links

__all__ = [
    "Control",
    "EndKind",
    "Ending",
    "Links",
    "RefusedError",
    "find_links",
    "fits_messages",
    "live_links",
    "open_links",
]
