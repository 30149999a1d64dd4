"""Step a matrix optimizer on sharded parameters: each full matrix is stepped by one rank, its owner.

    shards of value, gradient, state  rank 0: a0 b0 c0   rank 1: a1 b1 c1      held by every rank
    to the owners, in one message     rank 0: a0 a1      rank 1: b0 b1 c0 c1   owners: greedy, by size
    the optimizer's own step          rank 0: a          rank 1: b c           plain tensors
    shards back, in one message       rank 0: a0 b0 c0   rank 1: a1 b1 c1

Between steps every rank holds its shards of all states, as of the parameters. So memory is balanced, and a
checkpoint can be resumed on any number of ranks; torch's `set_optimizer_state_dict` needs each parameter's
state on every rank. The cost is that states are communicated, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxdp.errors import InputError
from fxdp.ir.graph.model_tensors import local_of
from fxdp.ir.network.raw_bytes import pack, packed_size, unpack
from fxdp.ir.types.value_types import dtype_name
from fxdp.ranks.liveness.failure import guard
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.sharding.optimizer_counterpart import as_dtensor, counterpart_of, keep_options, rows_of
from fxdp.sharding.shard_owners import ShardOwners

_Type: TypeAlias = "tuple[tuple[int, ...], torch.dtype, str]"
"""Shape, dtype and type of device."""


@dataclass
class _Matrix:
    """A parameter to step, with one rank's knowledge about the parameter."""

    parameter: DTensor
    owner: int
    states: dict[str, Tensor]
    """The optimizer's states by name; sharded if the first dim of a state equals the parameter's."""
    full: Tensor | None = None
    """Value and gradient in full, on the owner."""
    layout: dict[str, _Type] = field(default_factory=dict)
    """Shapes and dtypes of the full states."""

    def has_rows(self, shape: Sequence[int]) -> bool:
        """Return whether a state of this shape is sharded."""
        return len(shape) > 0 and shape[0] == len(self.parameter)

    def on(self, kind: _Type, holder: int, holders: ShardOwners) -> _Type:
        """Return the shape, dtype and device of a holder's part of a value."""
        shape, dtype, device = kind
        if not self.has_rows(shape):
            return kind
        first, last = holders.range_of(shape[0], holder)
        return (last - first, *shape[1:]), dtype, device


def _assigned_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each item: the largest item first, each to the rank with the least load.

    So no rank has more than the mean plus the largest item.
    """
    load, owners = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += sizes[i]
    return owners


class OwnerUpdate:
    """One step of a matrix optimizer; a collective call, with gradients of the same parameters on all ranks.

    Raises
    ------
    InputError : the parameters are sharded over several meshes.
    RankFailedError : another rank failed or died.
    """

    twin: Optimizer
    """The counterpart; its parameters are full: those that this rank owns, and plain parameters."""

    def __init__(self, optimizer: Optimizer, process_mesh: ProcessMesh) -> None:
        self._optimizer, self._process_mesh = optimizer, process_mesh
        self.twin = counterpart_of(optimizer)
        stepped = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        sharded = [p for p in stepped if isinstance(p, DTensor)]
        if any(p.device_mesh != sharded[0].device_mesh for p in sharded):
            raise InputError(
                f"{type(optimizer).__name__} has parameters that are sharded over different meshes; expected "
                "those of one mesh: make an optimizer for each"
            )
        self._matrices: list[_Matrix] = []
        if sharded:
            self._holders = ShardOwners.of(sharded[0], process_mesh)
            owners = _assigned_owners([p.numel() for p in sharded], len(self._holders))
            self._matrices = [_matrix(p, o, optimizer) for p, o in zip(sharded, owners, strict=True)]
            with torch.no_grad(), guard(process_mesh):
                self._collect()
        self._fill_counterpart()

    def finish(self) -> None:
        """Give every rank its shards of the stepped values and states."""
        keep_options(self._optimizer, self.twin)
        fulls = {m.full for m in self._matrices}
        for parameter, states in self.twin.state.items():
            if parameter not in fulls:
                self._optimizer.state[parameter] = states
        if self._matrices:
            with torch.no_grad(), guard(self._process_mesh):
                self._agree_on_layouts()
                self._return()

    def _fill_counterpart(self) -> None:
        of = {m.parameter: m for m in self._matrices}
        for group, own in zip(self._optimizer.param_groups, self.twin.param_groups, strict=True):
            for parameter in group["params"]:
                if not isinstance(parameter, DTensor):
                    own["params"].append(parameter)
                    if parameter in self._optimizer.state:
                        self.twin.state[parameter] = self._optimizer.state[parameter]
                elif parameter in of and (full := of[parameter].full) is not None:
                    own["params"].append(full)

    def _collect(self) -> None:
        """Gather the shards of each matrix on the owner."""
        sent: list[list[Tensor]] = [[] for _ in self._holders.places]
        for m in self._matrices:
            gradient = m.parameter.grad
            assert gradient is not None
            rows = [local_of(v) for v in m.states.values() if isinstance(v, DTensor)]
            sent[m.owner] += [local_of(m.parameter), rows_of(m.parameter, gradient), *rows]
        mine = [m for m in self._matrices if m.owner == self._holders.rank]
        kinds = [(m, kind) for m in mine for kind in (_kind(m.parameter), _kind(m.parameter), *_row_kinds(m))]
        due = [[m.on(k, i, self._holders) for m, k in kinds] for i in range(len(self._holders))]
        parts = iter(zip(*self._exchange(sent, due), strict=True))
        for m in mine:
            m.full, gradient = torch.cat(next(parts)), torch.cat(next(parts))
            m.full.grad = gradient
            own = {n: torch.cat(next(parts)) if isinstance(v, DTensor) else v for n, v in m.states.items()}
            if own:
                self.twin.state[m.full] = own

    def _agree_on_layouts(self) -> None:
        """Exchange the layouts of states, because only an owner knows the states created by the step."""
        for m in self._matrices:
            if m.full is not None:
                m.layout = {n: _kind(v) for n, v in self.twin.state[m.full].items()}
        if all(m.states for m in self._matrices):
            for m in self._matrices:
                m.layout = {n: _kind(v) for n, v in m.states.items()}
            return
        own = [{name: _told(kind) for name, kind in m.layout.items()} for m in self._matrices]
        told = self._holders.told(own)
        for i, m in enumerate(self._matrices):
            m.layout = {name: _understood(kind) for name, kind in told[m.owner][i].items()}

    def _return(self) -> None:
        """Send shards of values and states from the owners, and states without shards to all ranks."""
        holders = self._holders
        sent: list[list[Tensor]] = [[] for _ in holders.places]
        due: list[list[_Type]] = [[] for _ in holders.places]
        for m in self._matrices:
            kinds = (_kind(m.parameter), *m.layout.values())
            due[m.owner] += [m.on(kind, holders.rank, holders) for kind in kinds]
            if m.full is None:
                continue
            own = self.twin.state[m.full]
            for value in (m.full, *[own[name] for name in m.layout]):
                for holder in range(len(holders)):
                    first, last = holders.range_of(len(m.parameter), holder)
                    sent[holder].append(value[first:last] if m.has_rows(value.shape) else value)
        got = [iter(parts) for parts in self._exchange(sent, due)]
        for m in self._matrices:
            local_of(m.parameter).copy_(next(got[m.owner]))
            states = self._optimizer.state[m.parameter]
            for name, kind in m.layout.items():
                states[name] = _kept(m, m.states.get(name), next(got[m.owner]), kind)

    def _exchange(self, sent: list[list[Tensor]], due: list[list[_Type]]) -> list[tuple[Tensor, ...]]:
        """Exchange tensors with all holders; return the tensors from each rank."""
        device = local_of(self._matrices[0].parameter).device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        packed = [pack([v.to(device) for v in values]) if values else nothing for values in sent]
        sizes = [packed_size([k[0] for k in kinds], [k[1] for k in kinds]) for kinds in due]
        return [
            unpack(part, [k[0] for k in kinds], [k[1] for k in kinds])
            for part, kinds in zip(self._holders.exchange(packed, sizes), due, strict=True)
        ]


def _kept(m: _Matrix, known: Tensor | None, value: Tensor, kind: _Type) -> Tensor:
    """Return a state after the step; an existing tensor is reused, because users may hold a reference."""
    if known is not None:
        local_of(known).copy_(value)
        return known
    shape, _, device = kind
    return as_dtensor(m.parameter, value, shape[0]) if m.has_rows(shape) else value.to(device)


def _matrix(parameter: DTensor, owner: int, optimizer: Optimizer) -> _Matrix:
    """Collect the states of a parameter; states that were loaded in full are sharded."""
    made = _Matrix(parameter, owner, {})
    for name, value in optimizer.state.get(parameter, {}).items():
        placed = isinstance(value, DTensor) and value.placements == parameter.placements
        if not placed and made.has_rows(value.shape):
            value = as_dtensor(parameter, rows_of(parameter, value), len(parameter))
        made.states[name] = value
    return made


def _row_kinds(m: _Matrix) -> list[_Type]:
    return [_kind(v) for v in m.states.values() if isinstance(v, DTensor)]


def _kind(value: Tensor) -> _Type:
    return tuple(value.shape), value.dtype, value.device.type


def _told(kind: _Type) -> tuple[tuple[int, ...], str, str]:
    shape, dtype, device = kind
    return shape, dtype_name(dtype), device


def _understood(told: tuple[tuple[int, ...], str, str]) -> _Type:
    shape, name, device = told
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return shape, dtype, device
