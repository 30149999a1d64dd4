"""A mesh whose ranks are there: the pure mesh, and the links that join its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from fxdp.errors import MeshError
from fxdp.ir.mesh import Mesh
from fxdp.ranks.comms import Comms


@dataclass(frozen=True)
class ProcessMesh:
    """What talks to other ranks takes this; what plans or rewrites takes its `mesh` alone.

    Attributes
    ----------
    mesh : axes, sizes and names of groups.
    links : connections and process groups; None at size 1 and for a mesh of sizes.
    device_mesh : the mesh that the user gave, if one.
    """

    mesh: Mesh
    comms: Comms | None = field(default=None, repr=False, compare=False)
    device_mesh: DeviceMesh | None = field(default=None, repr=False)

    @property
    def index(self) -> int:
        """This rank's place among all ranks of the mesh, the pipeline axis included."""
        return 0 if self.comms is None else self.comms.rank

    def check_ranks(self) -> None:
        """Refuse a mesh of sizes: enough for a plan, but nobody is there to exchange anything with.

        Raises
        ------
        MeshError : there are no links to other ranks.
        """
        mesh = self.mesh
        if mesh.world > 1 and self.comms is None:
            raise MeshError(
                f"{mesh} has sizes but no ranks, which is enough for fxdp.plan and fxdp.verify but not "
                f"to run; expected a DeviceMesh, as init_device_mesh({mesh.device_type!r}, "
                f"({mesh.world},), mesh_dim_names=('dp',)), or None for all ranks, in {mesh.world} "
                "processes started by torchrun"
            )
