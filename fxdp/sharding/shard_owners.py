"""The ranks that hold shards of a parameter, and their communication outside of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxdp.errors import InputError
from fxdp.ir.graph.model_tensors import sharding_of
from fxdp.ir.ops.parameter_shards import shard_range
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.torch_compat import shard_axes


@dataclass(frozen=True)
class ShardOwners:
    """The holders of a parameter's shards, in the order of the rows.

    Attributes
    ----------
    process_mesh : all ranks of the module's mesh.
    group : a process group of the holders; in a pipeline with replicated data ranks a larger group.
    places : the rank of each holder in the group.
    counts : the number of ranks over which rows are sharded, for each sharding.
    rank : this rank's index among the holders.
    """

    process_mesh: ProcessMesh
    group: dist.ProcessGroup
    places: tuple[int, ...]
    counts: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, parameter: DTensor, process_mesh: ProcessMesh) -> ShardOwners:
        """Return the holders of a sharded parameter."""
        axes, mesh = shard_axes(parameter), parameter.device_mesh
        counts = tuple(count for count, _ in sharding_of(parameter))
        if len(axes) == 1:
            group = mesh.get_group(axes[0])
            return cls(process_mesh, group, tuple(range(counts[0])), counts, mesh.get_local_rank(axes[0]))
        comms, here = process_mesh.comms, mesh.get_coordinate()
        if comms is None or comms.world_group is None or here is None:
            raise InputError("the parameters are sharded on another mesh than the module was compiled for")
        held = mesh.mesh[tuple(slice(None) if i in axes else place for i, place in enumerate(here))]
        members = dist.get_process_group_ranks(comms.world_group)
        places = tuple(members.index(rank) for rank in held.flatten().tolist())
        rank = places.index(dist.get_rank(comms.world_group))
        return cls(process_mesh, comms.world_group, places, counts, rank)

    def __len__(self) -> int:
        return len(self.places)

    def range_of(self, rows: int, holder: int) -> tuple[int, int]:
        """Return the range of rows of a holder."""
        sharded: list[tuple[int, int]] = []
        for count in reversed(self.counts):
            holder, place = divmod(holder, count)
            sharded.insert(0, (count, place))
        return shard_range(rows, sharded)

    def exchange(self, sent: Sequence[Tensor], due: Sequence[int]) -> list[Tensor]:
        """Return the bytes sent by each holder to this rank, `due` bytes each; a collective call."""
        size = dist.get_world_size(self.group)
        out, into = [0] * size, [0] * size
        for place, bytes_, expected in zip(self.places, sent, due, strict=True):
            out[place], into[place] = len(bytes_), expected
        by_place = sorted(zip(self.places, sent, strict=True), key=lambda pair: pair[0])
        got = torch.empty(sum(into), dtype=torch.uint8, device=sent[0].device)
        dist.all_to_all_single(got, torch.cat([s for _, s in by_place]), into, out, group=self.group)
        parts = torch.split(got, into)
        return [parts[place] for place in self.places]

    def told(self, value: object) -> list[Any]:
        """Return the value of each holder; a collective call of the mesh. For types see `gather_objects`."""
        found, comms = gather_objects(self.process_mesh, value), self.process_mesh.comms
        if comms is None:
            return found
        members = dist.get_process_group_ranks(self.group)
        return [found[comms.ranks.index(members[place])] for place in self.places]
