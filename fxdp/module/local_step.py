"""The step of an elementwise optimizer on sharded parameters: each rank steps on the rows it holds.

Each element of a parameter is stepped by itself, so rows give the numbers of the whole. torch would give the
same on `DTensor`s, where it can, but dispatches each op of a step for each of them, which takes longer than
the step itself.

On a CPU torch's `fused=True` rounds the last few elements of a tensor otherwise than those before, which fill
vectors of the processor. So there, and on one device with another number of threads, a last bit may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxdp.ir.model_tensors import held
from fxdp.module.optimizer_twin import dealt, keep_options, rows_of, twin_of
from fxdp.torch_compat import dtensor_like


@dataclass
class LocalRows:
    """What a twin steps on, kept from step to step: to read it takes longer than to step small parameters."""

    read: list[Any]
    """What it was made of: if any of these is another object, it must be made anew."""
    params: list[list[Tensor]]
    state: defaultdict[Tensor, dict[str, Any]]
    sharded: list[tuple[DTensor, Tensor]]
    """Parameters and their rows."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> LocalRows:
        """The rows of an optimizer's parameters and state."""
        groups = [group["params"] for group in optimizer.param_groups]
        made = cls([], [[held(p) for p in params] for params in groups], defaultdict(dict), [])
        for parameter in (p for params in groups for p in params):
            states = optimizer.state.get(parameter)
            if isinstance(parameter, DTensor):
                made.sharded.append((parameter, held(parameter)))
                if states:
                    made.state[held(parameter)] = _dealt_rows(parameter, states)
            elif states is not None:
                made.state[parameter] = states
        made.read = _parts(optimizer)
        return made

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether it is still what the optimizer has."""
        return _same(self.read, _parts(optimizer))


class LocalStep:
    """One step of an elementwise optimizer."""

    twin: Optimizer
    """Its parameters are this rank's rows."""
    rows: LocalRows

    def __init__(self, optimizer: Optimizer, last: LocalRows | None) -> None:
        """`last` is what the step before has left."""
        self._optimizer = optimizer
        self.rows = rows = last if last is not None and last.is_of(optimizer) else LocalRows.of(optimizer)
        self._values = _values(rows.state)
        self.twin = twin_of(optimizer)
        self.twin.state = rows.state
        for own, params in zip(self.twin.param_groups, rows.params, strict=True):
            own["params"] = params
        for parameter, local in rows.sharded:
            gradient = parameter.grad
            local.grad = None if gradient is None else rows_of(parameter, gradient)

    def finish(self) -> None:
        """Let the optimizer have the twin's state."""
        keep_options(self._optimizer, self.twin)
        for _, local in self.rows.sharded:
            local.grad = None  # or it would outlive the parameter's
        if _same(self._values, _values(self.rows.state)):  # all was written in place
            return
        for group, params in zip(self._optimizer.param_groups, self.rows.params, strict=True):
            for parameter, local in zip(group["params"], params, strict=True):
                if local in self.rows.state:
                    self._keep(parameter, self.rows.state[local])
        self.rows.read = _parts(self._optimizer)

    def _keep(self, parameter: Tensor, own: dict[str, Any]) -> None:
        if not isinstance(parameter, DTensor):
            self._optimizer.state[parameter] = own
            return
        states = self._optimizer.state[parameter]
        for name, value in own.items():
            before = states.get(name)
            known = held(before) if isinstance(before, DTensor) else before
            if known is not value or name not in states:
                states[name] = _as_seen(parameter, value)


def _values(state: Mapping[Tensor, Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(states.values() for states in state.values()))


def _parts(optimizer: Optimizer) -> list[Any]:
    """All objects that an optimizer's step depends on, but its options."""
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    state = optimizer.state
    return [*params, *map(held, params), *state, *state.values(), *_values(state)]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _dealt_rows(parameter: DTensor, states: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows of states, which become views of them: whole values may have been loaded."""
    rows = {name: _rows_in(parameter, value) for name, value in states.items()}
    for name, value in states.items():
        if (held(value) if isinstance(value, DTensor) else value) is not rows[name]:
            states[name] = _as_seen(parameter, rows[name])
    return rows


def _rows_in(parameter: DTensor, value: Any) -> Any:
    """What the twin has for a state: rows of what has the parameter's shape, anything else as it is."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
        return rows_of(parameter, value)
    return value


def _as_seen(parameter: DTensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != held(parameter).shape:
        return value
    if value.dtype == parameter.dtype:
        return dtensor_like(parameter, value)
    return dealt(parameter, value, len(parameter))
