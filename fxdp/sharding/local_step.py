"""Step an elementwise optimizer on sharded parameters: each rank steps its own shards.

Each element of a parameter is stepped independently, so shards give the numbers of the full parameter. Torch
gives equal results on `DTensor`s where it supports an optimizer, but dispatches each op of a step for each
`DTensor`, which takes longer than the step itself. Shards that are adjacent in memory, with adjacent
gradients, are stepped as one (`FlatShards`) if their group and number of finished steps are equal; all
further shards are stepped separately.

On a CPU torch's `fused=True` rounds the last few elements of a tensor differently from earlier elements,
which fill vectors of the processor. There, and on one device with a different number of threads, a last bit
may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxdp.ir.graph.model_tensors import all_local, local_of
from fxdp.sharding.flat_shards import (
    FlatShards,
    adjacent,
    alike,
    as_seen,
    in_cache,
    in_one_memory,
    line_from,
    room,
)
from fxdp.sharding.optimizer_counterpart import counterpart_of, keep_options, rows_of
from fxdp.torch_compat import local_shards

# runs at each step for all parameters: one call for all touches each object once
_GRAD, _PARAMS = attrgetter("grad"), itemgetter("params")
_VALUES, _IS_NONE = methodcaller("values"), partial(is_, None)


class _Member(NamedTuple):
    """A sharded parameter of an optimizer."""

    group: int
    parameter: DTensor
    rows: Tensor

    def goes_on_in(self, other: _Member) -> bool:
        """Return whether both parameters may be stepped as one."""
        return (self.group, self.rows.dtype, self.rows.device) == (
            other.group, other.rows.dtype, other.rows.device,
        )  # fmt: skip


@dataclass
class LocalShards:
    """The tensors on which a counterpart steps, kept from step to step, as collecting them takes time."""

    read: list[Any]
    """The objects from which this was made; if one of these is replaced, make anew. Empty during a step."""
    sizes: list[int]
    """The number of parameters of each group."""
    members: list[_Member]
    """The sharded parameters, ordered by group and by address."""
    parameters: list[DTensor]
    """The parameters of the members."""
    rooms: list[int]
    """For each member except the last: the bytes after which the next shard and gradient follow, or -1."""
    adjacent: list[bool] = field(default_factory=list)
    """For each member except the last: True if the gradient of the next member is adjacent, too."""
    params: list[list[Tensor]] = field(default_factory=list)
    state: defaultdict[Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    plain: list[Tensor] = field(default_factory=list)
    """The parameters that are not sharded."""
    alone: list[int] = field(default_factory=list)
    """The indices of members that are stepped separately."""
    lines: list[tuple[FlatShards, list[int]]] = field(default_factory=list)
    """Members that are stepped as one, with their indices."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> LocalShards:
        """Collect an optimizer's parameters, without joining any."""
        members = [
            _Member(number, parameter, local_of(parameter))
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        ]
        members.sort(key=lambda m: (m.group, m.rows.data_ptr()))
        rooms = [room(a.rows) if a.goes_on_in(b) else -1 for a, b in pairwise(members)]
        follow = adjacent([m.rows for m in members], rooms)
        if not all(group.get("fused") for group in optimizer.param_groups):
            follow = in_cache(follow, [m.rows for m in members])
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        rooms = [size if f else -1 for size, f in zip(rooms, follow, strict=True)]
        return cls([], sizes, members, [m.parameter for m in members], rooms)

    def gradients(self) -> list[Tensor | None]:
        """Return the shards of the members' gradients."""
        gradients = [*map(_GRAD, self.parameters)]
        found = local_shards(gradients, self.parameters)
        if not any(map(_IS_NONE, found)):
            return [*found]
        return [
            rows_of(p, gradient) if rows is None and gradient is not None else rows
            for p, rows, gradient in zip(self.parameters, found, gradients, strict=True)
        ]

    def join(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> None:
        """Find the members to step as one, if the answer may have changed."""
        flags = adjacent(gradients, self.rooms)
        if self.read and self.adjacent == flags and all(line.in_step() for line, _ in self.lines):
            return
        self.adjacent, self.state, self.alone, self.lines = flags, defaultdict(dict), [], []
        groups = [group["params"] for group in optimizer.param_groups]
        self.params = [[p for p in params if not isinstance(p, DTensor)] for params in groups]
        self.plain = list(chain.from_iterable(self.params))
        for parameter in self.plain:
            if parameter in optimizer.state:
                self.state[parameter] = optimizer.state[parameter]
        seen = optimizer.state
        states = [_state_shards(p, seen[p]) if seen.get(p) else {} for _, p, _ in self.members]
        follow = [flag and self._follow(i, states, gradients) for i, flag in enumerate(flags)]
        for run in _runs(follow, len(self.members)):
            self._add(run, [states[i] for i in run], seen)
        self.read = _parts(optimizer)

    def _follow(
        self, place: int, states: Sequence[dict[str, Any]], gradients: Sequence[Tensor | None]
    ) -> bool:
        """Return whether a member may be stepped as one with the next, given that both are adjacent."""
        one, other = self.members[place : place + 2]
        gradient, following = gradients[place : place + 2]
        if gradient is None or following is None or not in_one_memory(gradient, following):
            return False
        both = states[place], states[place + 1]
        return in_one_memory(one.rows, other.rows) and alike(both, (one.parameter, other.parameter))

    def _add(self, run: list[int], states: list[dict[str, Any]], seen: MutableMapping[Tensor, Any]) -> None:
        """Add the members with these indices as one tensor to step."""
        group, _, rows = self.members[run[0]]
        if len(run) == 1:
            self.alone += run
            self._step_on(group, rows, states[0])
            return
        line = FlatShards.of([self.members[i].parameter for i in run], states, seen)
        self.lines.append((line, run))
        self._step_on(group, line.flat, line.state)

    def _step_on(self, group: int, rows: Tensor, state: dict[str, Any]) -> None:
        self.params[group].append(rows)
        if state:
            self.state[rows] = state

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer still has the same parameters and states."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return sizes == self.sizes and _same(self.read, _parts(optimizer))

    def with_state(self) -> set[Tensor]:
        """Return the parameters that have been stepped with a state."""
        of_lines = (p for line, _ in self.lines if line.flat in self.state for p in line.parameters)
        of_others = (self.members[i] for i in self.alone)
        rows = (member.parameter for member in of_others if member.rows in self.state)
        return {*of_lines, *rows, *(p for p in self.plain if p in self.state)}


class LocalStep:
    """One step of an elementwise optimizer."""

    twin: Optimizer
    """The counterpart, whose parameters are this rank's shards."""
    rows: LocalShards

    def __init__(self, optimizer: Optimizer, last: LocalShards | None) -> None:
        """Prepare a step; `last` are the tensors kept from the previous step."""
        self._optimizer = optimizer
        self.rows = rows = last if last is not None and last.is_of(optimizer) else LocalShards.of(optimizer)
        gradients = rows.gradients()
        rows.join(optimizer, gradients)
        self._values = _values(rows.state)
        self._parts, rows.read = rows.read, []  # after a step that raises, nothing is kept
        self.twin = counterpart_of(optimizer)
        self.twin.state = rows.state
        for own, params in zip(self.twin.param_groups, rows.params, strict=True):
            own["params"] = params
        for place in rows.alone:
            rows.members[place].rows.grad = gradients[place]
        for line, run in rows.lines:
            line.flat.grad = _as_line(gradients, run, line.flat.numel())

    def finish(self) -> None:
        """Copy the state of the counterpart to the optimizer."""
        rows, optimizer = self.rows, self._optimizer
        keep_options(optimizer, self.twin)
        in_place = _same(self._values, _values(rows.state))
        if not in_place:
            _enter(optimizer, rows.with_state())
        for place in rows.alone:
            rows.members[place].rows.grad = None  # or it would outlive the parameter's gradient
        for line, _ in rows.lines:
            line.finish(rows.state.get(line.flat, {}), optimizer.state)
        for line, _ in rows.lines:
            line.record()
        if not in_place:
            self._hand_out()
        rows.read = self._parts if in_place else _parts(optimizer)

    def _hand_out(self) -> None:
        """Give the new states to parameters that were stepped separately."""
        rows, seen = self.rows, self._optimizer.state
        for place in rows.alone:
            _, parameter, local = rows.members[place]
            if local in rows.state:
                _keep(seen[parameter], parameter, rows.state[local])
        for plain in rows.plain:
            if plain in rows.state:
                seen[plain] = rows.state[plain]


def _enter(optimizer: Optimizer, stepped: set[Tensor]) -> None:
    """Create state entries for these parameters in the optimizer's order, which is equal on all ranks.

    Joins of shards differ between ranks, and ranks that save or load gather one state after another.
    """
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter in stepped:
            optimizer.state[parameter]


def _keep(states: dict[str, Any], parameter: DTensor, own: Mapping[str, Any]) -> None:
    """Set a parameter's states to the states of its shard."""
    for name, value in own.items():
        before = states.get(name)
        known = local_of(before) if isinstance(before, DTensor) else before
        if known is not value or name not in states:
            states[name] = as_seen(parameter, value)


def _runs(adjacent: Sequence[bool], count: int) -> Iterator[list[int]]:
    """Yield runs of indices that are joined, each with the next."""
    run: list[int] = []
    for place in range(count):
        run.append(place)
        if place == count - 1 or not adjacent[place]:
            yield run
            run = []


def _as_line(gradients: Sequence[Tensor | None], places: Sequence[int], count: int) -> Tensor:
    """Return adjacent gradients as one tensor."""
    first = gradients[places[0]]
    assert first is not None
    line = line_from(first, count)
    if line is None:
        line = torch.cat([g.detach().reshape(-1) for place in places if (g := gradients[place]) is not None])
    return line


def _values(state: Mapping[Tensor, Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, state.values())))


def _parts(optimizer: Optimizer) -> list[Any]:
    """Return all objects on which an optimizer's step depends, except options."""
    params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    state = optimizer.state
    return [*params, *all_local(params), *state, *state.values(), *_values(state)]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both sequences contain the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _state_shards(parameter: DTensor, states: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's shards of the states, and replace loaded full states by views of these shards."""
    rows = {name: _rows_in(parameter, value) for name, value in states.items()}
    for name, value in states.items():
        if (local_of(value) if isinstance(value, DTensor) else value) is not rows[name]:
            states[name] = as_seen(parameter, rows[name])
    return rows


def _rows_in(parameter: DTensor, value: Any) -> Any:
    """Return the shard of a state with the parameter's shape; return any other state unchanged."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
        return rows_of(parameter, value)
    return value
