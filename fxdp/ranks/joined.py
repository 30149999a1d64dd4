"""A mesh whose ranks are there: the pure mesh, and the links that join its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from fxdp.ir.mesh import Mesh
from fxdp.ranks.links import Links


@dataclass(frozen=True)
class Joined:
    """What talks to other ranks takes this; what plans or rewrites takes its `mesh` alone.

    Attributes
    ----------
    mesh : axes, sizes and names of groups.
    links : connections and process groups; None at size 1 and for a mesh of sizes.
    device_mesh : the mesh that the user gave, if one.
    """

    mesh: Mesh
    links: Links | None = field(default=None, repr=False, compare=False)
    device_mesh: DeviceMesh | None = field(default=None, repr=False)
