"""The step of an elementwise optimizer on sharded parameters: each rank steps on the rows it holds.

Each element of a parameter is stepped by itself, so rows give the numbers of the full value. torch would give
the
same on `DTensor`s, where it can, but dispatches each op of a step for each of them, which takes longer than
the step itself. Rows that lie side by side, as their gradients do, are stepped as one (`FlatShards`), those
of one group with the same number of steps behind them; any others by themselves.

On a CPU torch's `fused=True` rounds the last few elements of a tensor otherwise than those before, which fill
vectors of the processor. So there, and on one device with another number of threads, a last bit may differ.
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

from fxdp.ir.model_tensors import all_local, local_of
from fxdp.module.flat_shards import (
    FlatShards,
    alike,
    as_seen,
    in_cache,
    in_one_memory,
    line_from,
    process_mesh,
    room,
)
from fxdp.module.optimizer_counterpart import counterpart_of, keep_options, rows_of
from fxdp.torch_compat import local_shards

# of all parameters at each step, so by one call for all: that touches each object once and nothing else
_GRAD, _PARAMS = attrgetter("grad"), itemgetter("params")
_VALUES, _IS_NONE = methodcaller("values"), partial(is_, None)


class _Member(NamedTuple):
    """A sharded parameter of an optimizer."""

    group: int
    parameter: DTensor
    rows: Tensor

    def goes_on_in(self, other: _Member) -> bool:
        """Whether both may be stepped as one."""
        return (self.group, self.rows.dtype, self.rows.device) == (
            other.group, other.rows.dtype, other.rows.device,
        )  # fmt: skip


@dataclass
class LocalShards:
    """What a twin steps on, kept from step to step: to read it takes longer than to step small parameters."""

    read: list[Any]
    """What it was made of: if any of these is another object, it must be made anew. Empty during a step."""
    sizes: list[int]
    """How many parameters the groups have."""
    members: list[_Member]
    """The sharded parameters, group by group as they lie in memory."""
    parameters: list[DTensor]
    """Those of the members."""
    rooms: list[int]
    """The bytes of rows and gradients behind which each of them but the last goes on in the next; or -1."""
    process_mesh: list[bool] = field(default_factory=list)
    """Whether its gradient does so, too."""
    params: list[list[Tensor]] = field(default_factory=list)
    state: defaultdict[Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    plain: list[Tensor] = field(default_factory=list)
    """The parameters that are not sharded."""
    alone: list[int] = field(default_factory=list)
    """The members that are stepped by themselves."""
    lines: list[tuple[FlatShards, list[int]]] = field(default_factory=list)
    """Members that are stepped as one, and their places."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> LocalShards:
        """An optimizer's parameters, of which nothing is joined yet."""
        members = [
            _Member(number, parameter, local_of(parameter))
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        ]
        members.sort(key=lambda m: (m.group, m.rows.data_ptr()))
        rooms = [room(a.rows) if a.goes_on_in(b) else -1 for a, b in pairwise(members)]
        follow = process_mesh([m.rows for m in members], rooms)
        if not all(group.get("fused") for group in optimizer.param_groups):
            follow = in_cache(follow, [m.rows for m in members])
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        rooms = [size if f else -1 for size, f in zip(rooms, follow, strict=True)]
        return cls([], sizes, members, [m.parameter for m in members], rooms)

    def gradients(self) -> list[Tensor | None]:
        """The rows of the members' gradients."""
        gradients = [*map(_GRAD, self.parameters)]
        found = local_shards(gradients, self.parameters)
        if not any(map(_IS_NONE, found)):
            return [*found]
        return [
            rows_of(p, gradient) if rows is None and gradient is not None else rows
            for p, rows, gradient in zip(self.parameters, found, gradients, strict=True)
        ]

    def join(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> None:
        """Find what is stepped as one, if that has changed."""
        flags = process_mesh(gradients, self.rooms)
        if self.read and self.process_mesh == flags and all(line.in_step() for line, _ in self.lines):
            return
        self.process_mesh, self.state, self.alone, self.lines = flags, defaultdict(dict), [], []
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
        """Whether a member may be stepped as one with the next, beside which it and its gradient lie."""
        one, other = self.members[place : place + 2]
        gradient, following = gradients[place : place + 2]
        if gradient is None or following is None or not in_one_memory(gradient, following):
            return False
        both = states[place], states[place + 1]
        return in_one_memory(one.rows, other.rows) and alike(both, (one.parameter, other.parameter))

    def _add(self, run: list[int], states: list[dict[str, Any]], seen: MutableMapping[Tensor, Any]) -> None:
        """Members at these places, as one."""
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
        """Whether it is still what the optimizer has."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return sizes == self.sizes and _same(self.read, _parts(optimizer))

    def with_state(self) -> set[Tensor]:
        """The parameters that have been stepped with a state."""
        of_lines = (p for line, _ in self.lines if line.flat in self.state for p in line.parameters)
        of_others = (self.members[i] for i in self.alone)
        rows = (member.parameter for member in of_others if member.rows in self.state)
        return {*of_lines, *rows, *(p for p in self.plain if p in self.state)}


class LocalStep:
    """One step of an elementwise optimizer."""

    twin: Optimizer
    """Its parameters are this rank's rows."""
    rows: LocalShards

    def __init__(self, optimizer: Optimizer, last: LocalShards | None) -> None:
        """`last` is what the step before has left."""
        self._optimizer = optimizer
        self.rows = rows = last if last is not None and last.is_of(optimizer) else LocalShards.of(optimizer)
        gradients = rows.gradients()
        rows.join(optimizer, gradients)
        self._values = _values(rows.state)
        self._parts, rows.read = rows.read, []  # what a step that raises has left is not gone on with
        self.twin = counterpart_of(optimizer)
        self.twin.state = rows.state
        for own, params in zip(self.twin.param_groups, rows.params, strict=True):
            own["params"] = params
        for place in rows.alone:
            rows.members[place].rows.grad = gradients[place]
        for line, run in rows.lines:
            line.flat.grad = _as_line(gradients, run, line.flat.numel())

    def finish(self) -> None:
        """Let the optimizer have the twin's state."""
        rows, optimizer = self.rows, self._optimizer
        keep_options(optimizer, self.twin)
        in_place = _same(self._values, _values(rows.state))
        if not in_place:
            _enter(optimizer, rows.with_state())
        for place in rows.alone:
            rows.members[place].rows.grad = None  # or it would outlive the parameter's
        for line, _ in rows.lines:
            line.finish(rows.state.get(line.flat, {}), optimizer.state)
        for line, _ in rows.lines:
            line.meta()
        if not in_place:
            self._hand_out()
        rows.read = self._parts if in_place else _parts(optimizer)

    def _hand_out(self) -> None:
        """Let parameters that were stepped by themselves have the states that the step has made."""
        rows, seen = self.rows, self._optimizer.state
        for place in rows.alone:
            _, parameter, local = rows.members[place]
            if local in rows.state:
                _keep(seen[parameter], parameter, rows.state[local])
        for plain in rows.plain:
            if plain in rows.state:
                seen[plain] = rows.state[plain]


def _enter(optimizer: Optimizer, stepped: set[Tensor]) -> None:
    """Let these parameters have states in the optimizer's order, whatever is joined on this rank.

    Ranks that save or load gather one state after another.
    """
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter in stepped:
            optimizer.state[parameter]


def _keep(states: dict[str, Any], parameter: DTensor, own: Mapping[str, Any]) -> None:
    """Let a parameter's states be those that its rows have got."""
    for name, value in own.items():
        before = states.get(name)
        known = local_of(before) if isinstance(before, DTensor) else before
        if known is not value or name not in states:
            states[name] = as_seen(parameter, value)


def _runs(process_mesh: Sequence[bool], count: int) -> Iterator[list[int]]:
    """Places that are joined, each with the next."""
    run: list[int] = []
    for place in range(count):
        run.append(place)
        if place == count - 1 or not process_mesh[place]:
            yield run
            run = []


def _as_line(gradients: Sequence[Tensor | None], places: Sequence[int], count: int) -> Tensor:
    """Gradients that lie side by side as one tensor."""
    first = gradients[places[0]]
    assert first is not None
    line = line_from(first, count)
    if line is None:
        line = torch.cat([g.detach().reshape(-1) for place in places if (g := gradients[place]) is not None])
    return line


def _values(state: Mapping[Tensor, Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, state.values())))


def _parts(optimizer: Optimizer) -> list[Any]:
    """All objects that an optimizer's step depends on, but its options."""
    params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    state = optimizer.state
    return [*params, *all_local(params), *state, *state.values(), *_values(state)]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _state_shards(parameter: DTensor, states: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows of states, which become views of them: full values may have been loaded."""
    rows = {name: _rows_in(parameter, value) for name, value in states.items()}
    for name, value in states.items():
        if (local_of(value) if isinstance(value, DTensor) else value) is not rows[name]:
            states[name] = as_seen(parameter, rows[name])
    return rows


def _rows_in(parameter: DTensor, value: Any) -> Any:
    """What the twin has for a state: rows of what has the parameter's shape, anything else as it is."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
        return rows_of(parameter, value)
    return value
