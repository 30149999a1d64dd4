r"""Mesh values: axes, sizes, a rank's coordinates, process group names.

    pp \ dp    0   1   2        data axes   are one logical axis: a rank's index there is the one along
      0        0   1   2                    all of them, the first axis slowest
      1        3   4   5        column      of rank 4: (1, 4), the ranks with equal data

Passes, plans and the oracle use this value. Nothing here communicates, so a plan can be made for a mesh of
any size; `ProcessMesh` in `ranks/process_mesh.py` is a mesh of running ranks.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from math import prod
from typing import Literal, TypeAlias

from fxdp.errors import MeshError
from fxdp.ir.network.link_cost import LinkCost

AXES = ("pp", "dp", "dp_replicate", "dp_shard")
REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""The data axes along which parameters are replicated and along which they are sharded."""
REGATHER = "regather"
"""The axis name of post-forward groups: parts of the axis along which parameters are sharded.

The name is no axis of a mesh. The forward leaves each full value sharded over the ranks of one group, and the
backward gathers within the group.

    dp_shard    0 1 2 3 4 5      gathered in the forward
    regather    0 1 2|3 4 5      each three keep a full value between them, which the backward gathers
"""
_PIPELINE = "pp"
_MOST_RANKS = 1 << 20
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_Purpose: TypeAlias = Literal["data", "reduce", "rows", "messages"]
"""The purpose of a process group.

`data`: large values of the forward. `reduce`: gradients, so that they have a stream of their own on CUDA.
`rows`: sharded parameters and reduced gradients. `messages`: small values that the calling thread sends
itself, on CPU.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Name of a process group, for functional collectives; `axis` is None for all data axes at once."""

    name: str
    purpose: _Purpose = "data"
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class _PipelineAxis:
    """Pipeline axis of a mesh, seen from one rank.

    Attributes
    ----------
    size : the number of pipeline ranks.
    rank : this rank's index along the axis.
    column : the index, among all ranks of the mesh, of each pipeline rank that has this rank's data.
    data_ranks : for each rank of the mesh, its index along the data axes.
    """

    size: int = 1
    rank: int = 0
    column: tuple[int, ...] = (0,)
    data_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh:
    """Data axes of a mesh, which form one logical axis, and its pipeline axis, seen from one rank.

    Attributes
    ----------
    axes : the names of the data axes, in mesh order.
    sizes : the size of each data axis.
    rank : this rank's index along the flattened data axes.
    ranks : the global rank at each index.
    device_type : the device type of the model.
    pipeline : the pipeline axis, of size 1 if the mesh has none.
    groups : the process groups of the ranks; none in a plan, or at size 1.
    messages : True if small values travel by fxdp's own messages, not by a process group.
    shared_memory : True if all ranks are on one host and can reduce through shared memory.
    direct_sums : True if these reductions need no buffers, because each rank reads values of the remaining
        ranks directly.
    host_sums : True if ranks are on several hosts, and reduce through shared memory within each host.
    link : the cost of an all-reduce over the network, if there is one and it was measured.
    alike : True if all ranks compute with equal processors, so that equal operands give equal bits.
    post_forward_size : the number of ranks among which the backward gathers sharded parameters; 0: all.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int
    ranks: tuple[int, ...]
    device_type: str
    pipeline: _PipelineAxis = _PipelineAxis()
    groups: tuple[Group, ...] = ()
    messages: bool = True
    shared_memory: bool = False
    direct_sums: bool = False
    host_sums: bool = False
    link: LinkCost | None = None
    alike: bool = True
    post_forward_size: int = 0

    @property
    def size(self) -> int:
        """The number of ranks along all data axes."""
        return prod(self.sizes)

    @property
    def world(self) -> int:
        """The number of ranks of the entire mesh."""
        return self.size * self.pipeline.size

    @property
    def shape(self) -> dict[str, int]:
        """The data axes with their sizes, in mesh order."""
        return dict(zip(self.axes, self.sizes, strict=True))

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index along each data axis."""
        found, rest = {}, self.rank
        for axis, size in reversed(self.shape.items()):
            rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in self.axes}

    @property
    def backend(self) -> str:
        """The backend for large collectives, `gloo` or `nccl`; empty in the plan of a model on `meta`."""
        return _BACKENDS.get(self.device_type, "")

    def size_along(self, axis: str | None) -> int:
        """Return the number of ranks along a data axis, or along all data axes for None."""
        if axis == REGATHER:
            return self.post_forward_size
        return self.size if axis is None else self.shape[axis]

    def place_along(self, axis: str | None) -> int:
        """Return this rank's index along a data axis, or along all data axes for None."""
        if axis == REGATHER:
            return self.place_along(self.shard_axis) % self.post_forward_size
        return self.rank if axis is None else self.coordinates[axis]

    def group(self, purpose: _Purpose = "data", axis: str | None = None) -> str:
        """Return the name of the group for functional collectives along an axis (None: all data axes).

        The name is empty if there are no groups. A single axis has one group, for large values of both
        phases.
        """
        if len(self.axes) == 1 and axis in self.axes:
            axis = None
        found = {(g.purpose, g.axis): g.name for g in self.groups}
        return found.get((purpose if axis is None else "data", axis), "")

    @property
    def shard_axis(self) -> str | None:
        """The data axis along which parameters are sharded; None if there is only one data axis."""
        return SHARD if {REPLICATE, SHARD} <= set(self.axes) else None

    @property
    def sharding(self) -> tuple[tuple[int, int], ...]:
        """The sharding of parameters as (number of ranks, index of this rank) pairs, outermost first.

        The first pair is for the data axis; a second one is for the pipeline axis, which shards a data rank's
        rows once more.
        """
        axis = self.shard_axis
        data = (self.size_along(axis), self.place_along(axis))
        pipeline = self.pipeline
        return (data, (pipeline.size, pipeline.rank)) if pipeline.size > 1 else (data,)

    def along(self, axis: str | None) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that communicate along an axis, by index along all data axes.

        axes a=2, b=3     along a: (0, 3) (1, 4) (2, 5)     along b: (0, 1, 2) (3, 4, 5)
        """
        if axis is None:
            return (tuple(range(self.size)),)
        if axis == REGATHER:
            each = self.post_forward_size
            return tuple(
                all_of[first : first + each]
                for all_of in self.along(self.shard_axis)
                for first in range(0, len(all_of), each)
            )
        place = self.axes.index(axis)
        size, stride = self.sizes[place], prod(self.sizes[place + 1 :])
        firsts = [i for i in range(self.size) if i // stride % size == 0]
        return tuple(tuple(first + i * stride for i in range(size)) for first in firsts)

    def in_parts(self, microbatches: int) -> Mesh:
        """Return the mesh with micro-batches as a further data axis, seen from the first of this rank.

        Passes place values on this mesh; nothing communicates along the new axis.
        """
        axes, sizes = (*self.axes, "microbatch"), (*self.sizes, microbatches)
        return replace(self, axes=axes, sizes=sizes, rank=self.rank * microbatches)

    @property
    def entire(self) -> dict[str, int]:
        """The axes with their sizes, a pipeline axis of several ranks first."""
        return {**({_PIPELINE: self.pipeline.size} if self.pipeline.size > 1 else {}), **self.shape}

    def __str__(self) -> str:
        return f"mesh({', '.join(f'{axis}={size}' for axis, size in self.shape.items())})"


def mesh_of(shape: Mapping[str, int], device_type: str, index: int = 0) -> Mesh:
    """Return the mesh with these sizes by axis name, seen from the rank with this index.

    Raises
    ------
    MeshError : an axis is unknown, or a size is not a positive integer.
    """
    check_axes(tuple(shape))
    wrong = [f"{name}={size!r}" for name, size in shape.items() if not _is_size(size)]
    if wrong:
        raise MeshError(f"mesh sizes {', '.join(wrong)}; expected integers >= 1")
    if prod(shape.values()) > _MOST_RANKS:
        raise MeshError(
            f"the mesh ({', '.join(shape)}) has more than {_MOST_RANKS:,} ranks; expected as many as there "
            "are, or may be one day"
        )
    axes = {name: size for name, size in shape.items() if name != _PIPELINE} or {"dp": 1}
    axis = list(shape).index(_PIPELINE) if _PIPELINE in shape else None
    stages = [0 if axis is None else at[axis] for at in product(*map(range, shape.values()))]
    along = defaultdict[int, Iterator[int]](count)  # per stage: the data index, first axis slowest
    places = [(stage, next(along[stage])) for stage in stages]
    stage, data = places[index]
    column = tuple(places.index((p, data)) for p in range(shape.get(_PIPELINE, 1)))
    pipeline = _PipelineAxis(len(column), stage, column, tuple(place for _, place in places))
    row = tuple(i for i, (p, _) in enumerate(places) if p == stage)
    return Mesh(tuple(axes), tuple(axes.values()), data, row, device_type, pipeline)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_axes(names: Sequence[str]) -> None:
    """Raise if a mesh cannot have axes of these names.

    Raises
    ------
    MeshError : a name is unknown; the message has the nearest names.
    """
    numbered = [name for name in names if not isinstance(name, str)]
    if numbered:
        raise MeshError(f"mesh axes {list(names)}: got {numbered}, expected names out of {list(AXES)}")
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        near = {name: difflib.get_close_matches(name, AXES, n=1, cutoff=0.4) for name in unknown}
        hints = [f"{name!r}: did you mean {match[0]!r}?" for name, match in near.items() if match]
        raise MeshError(
            f"mesh axes {list(names)}: got {unknown or 'none'}, expected names out of {list(AXES)}"
            + "".join(f"\n  {hint}" for hint in hints)
            + "\n  give the axis over which the batch is split the name 'dp'"
        )


def backend_of(device_type: str) -> str:
    """Return the process group backend for a device type.

    Raises
    ------
    MeshError : the device type has no backend.
    """
    if device_type not in _BACKENDS:
        raise MeshError(
            f"the model is on device type {device_type!r}; expected one of {sorted(_BACKENDS)}: move it there"
        )
    return _BACKENDS[device_type]
