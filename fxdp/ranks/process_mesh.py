"""A mesh with connected ranks: the pure mesh, and all connections."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from fxdp.errors import MeshError, RankFailedError, StateError
from fxdp.ir.types.mesh import Mesh
from fxdp.ranks.comms import Comms


@dataclass(frozen=True)
class ProcessMesh:
    """A mesh for code that communicates; code that plans or rewrites uses only `mesh`.

    Attributes
    ----------
    mesh : axes, sizes and names of groups.
    comms : connections and process groups; None at size 1 and for a mesh of sizes.
    device_mesh : the user's mesh, if given.
    """

    mesh: Mesh
    comms: Comms | None = field(default=None, repr=False, compare=False)
    device_mesh: DeviceMesh | None = field(default=None, repr=False)

    @property
    def index(self) -> int:
        """Index of this rank among all ranks of the mesh, including the pipeline axis."""
        return 0 if self.comms is None else self.comms.rank

    def check_ranks(self) -> None:
        """Refuse a mesh that has only sizes, which is enough for a plan but cannot exchange anything.

        Raises
        ------
        MeshError : there are no connections to ranks of this mesh.
        """
        mesh = self.mesh
        if mesh.world > 1 and self.comms is None:
            raise MeshError(
                f"mesh={mesh.entire} has sizes but no ranks, enough for fxdp.plan and fxdp.verify, but not "
                f"to run; expected a DeviceMesh, as init_device_mesh({mesh.device_type!r}, "
                f"{(*mesh.entire.values(),)}, mesh_dim_names={(*mesh.entire,)}), or None for all ranks along "
                f"dp, in {mesh.world} processes started by torchrun"
            )

    def check_alive(self) -> None:
        """Check that the mesh can still be used; cheap enough for every step.

        Raises
        ------
        StateError : the process group was destroyed, or this rank failed inside an earlier call.
        RankFailedError : another rank has failed.
        """
        comms = self.comms
        departure = None if comms is None else comms.liveness.departure
        if comms is None or (comms.alive and departure is None):
            return
        if departure is None:
            raise StateError(
                "the process group was destroyed after this module was compiled; expected it to live as long "
                "as the module is called: call torch.distributed.destroy_process_group() last, or compile "
                "again after a new init_process_group()"
            )
        if departure.rank == comms.rank:
            raise StateError(
                f"an earlier call stopped half-way on this rank ({departure.text.splitlines()[0]}) and the "
                "other ranks were told; compile the model again to go on"
            )
        words = comms.control.words(departure)
        raise RankFailedError(f"{words}\ncompile the model again to go on, if all ranks are still there")
