"""Join shards of parameters that are adjacent in memory, so that one op of an optimizer steps many.

    rows         | w1 ..   | b1 | w2 ..   |    views of one buffer, like all sharded parameters
    gradients    | w1 ..   | b1 | w2 ..   |    the result of a bucket's reduce-scatter
    exp_avg      | w1 ..   | b1 | w2 ..   |    one tensor; users see a `DTensor` for each part
    step         | 3       | 3  | 3       |    one tensor with a number for each; the first one is stepped

Only optimizers that step elementwise may use joined shards.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import eq, sub
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxdp.ir.graph.model_tensors import local_of
from fxdp.ir.network.adjoining import line_of
from fxdp.sharding.optimizer_counterpart import as_dtensor
from fxdp.torch_compat import dtensor_like

# Torch's kernels round elements that do not fill two vectors of the processor differently, and split work
# among threads by cache lines: behind a multiple of both sizes each element is rounded as in a separate
# tensor.
_FULL_BYTES = 128
# The bytes of shards that a core's own cache (1 to 2 MiB) holds beside gradients, two states and a result.
# AdamW's ten ops on 2.6 million elements: 6.8 ms as one, 4.1 in lines of 64 to 660 KB, 5.3 on 80 parameters.
_IN_CACHE = 2**18


def room(rows: Tensor) -> int:
    """Return the bytes after which a following shard may be joined; -1 if none may."""
    full = rows.numel() > 0 and rows.nbytes % _FULL_BYTES == 0 and rows.is_contiguous()
    # complex values may be conjugated on read, for each tensor separately
    return rows.nbytes if full and not rows.is_complex() else -1


def adjacent(tensors: Sequence[Tensor | None], rooms: Sequence[int]) -> list[bool]:
    """Return for each tensor except the last whether the next tensor follows after the given bytes."""
    # called at each step for each parameter: one call for all tensors is ten times as fast
    there: list[Any] = [tensor for tensor in tensors if tensor is not None]
    if not all(map(Tensor.is_contiguous, there)):
        return [False] * len(rooms)
    at = [*map(Tensor.data_ptr, there)]
    if len(at) < len(tensors):
        at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return list(map(eq, map(sub, at[1:], at), rooms))


def in_cache(adjacent: Sequence[bool], tensors: Sequence[Tensor]) -> list[bool]:
    """Limit joined tensors to lines that fit into the processor's cache; each op runs over a line."""
    found, line = [], 0
    for goes_on, one, following in zip(adjacent, tensors, tensors[1:], strict=False):
        line += one.nbytes
        found.append(goes_on and (not one.is_cpu or line + following.nbytes <= _IN_CACHE))
        line *= found[-1]
    return found


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent tensors as one flat view, without a copy; None if the tensors are not adjacent."""
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return None
    return line_of(tensors, [tensor.numel() for tensor in tensors])


def in_one_memory(some: Tensor, other: Tensor) -> bool:
    """Return whether both tensors share an allocation; separate allocations do not count as adjacent."""
    return some.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def line_from(first: Tensor, count: int) -> Tensor | None:
    """Return `count` elements of a tensor's memory as a flat view; None if the memory ends before."""
    if first.storage_offset() + count > first.untyped_storage().nbytes() // first.itemsize:
        return None  # two allocations that happen to be neighbours
    return first.detach().as_strided((count,), (1,))


@dataclass
class FlatShards:
    """Shards of several parameters as one flat tensor, with optimizer states."""

    parameters: list[DTensor]
    flat: Tensor
    state: dict[str, Any]
    """The optimizer's state for `flat`; empty before the first step."""
    _numbers: dict[str, Tensor] = field(default_factory=dict)
    """The states that are a number: one tensor with a number per parameter, all equal."""
    _others: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of `_numbers` without the first element, which is stepped."""
    _known: dict[str, Any] = field(default_factory=dict)
    """The values of `state` that were given to the parameters."""
    _written: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, parameters: list[DTensor], states: Sequence[Mapping[str, Any]],
        seen: Mapping[Tensor, MutableMapping[str, Any]],
    ) -> FlatShards:  # fmt: skip
        """Join parameters with adjacent shards in one allocation, and their states, which must be joinable.

        `seen` holds the states that users see: states that were not adjacent are replaced.
        """
        flat = _as_one([local_of(p) for p in parameters])
        assert flat is not None
        made = cls(parameters, flat, {})
        for name, value in states[0].items():
            if not isinstance(value, Tensor):
                made.state[name] = value
                continue
            values = [state[name] for state in states]
            one = _as_one(values)
            line = torch.cat([value.reshape(-1) for value in values]) if one is None else one
            made._take(name, line, is_number=value.dim() == 0)
            if one is None:
                made._hand_out(name, line, seen)
        made.record()
        return made

    def in_step(self) -> bool:
        """Return whether the numbers were not written since `meta`, and so are equal."""
        return self._written == [numbers._version for numbers in self._numbers.values()]

    def finish(self, own: dict[str, Any], seen: Mapping[Tensor, MutableMapping[str, Any]]) -> None:
        """Give the parameters their parts of the states after a step."""
        self.flat.grad = None  # otherwise the gradient would outlive the gradients of the parameters
        self.state = own
        for name, value in list(own.items()):
            if self._known.get(name, self) is not value:
                self._adopt(name, value, seen)
            elif (others := self._others.get(name)) is not None:
                others.copy_(value)

    def _adopt(self, name: str, value: Any, seen: Mapping[Tensor, MutableMapping[str, Any]]) -> None:
        """Give the parameters their parts of a state that the step has created."""
        if not isinstance(value, Tensor):
            self._known[name] = value
            for parameter in self.parameters:
                seen[parameter][name] = value
            return
        is_number = value.dim() == 0
        line = value.repeat(len(self.parameters)) if is_number else value
        self._take(name, line, is_number=is_number)
        self._hand_out(name, line, seen)

    def _take(self, name: str, line: Tensor, *, is_number: bool) -> None:
        if is_number:
            self._numbers[name], self._others[name] = line, line[1:]
        self.state[name] = self._known[name] = line[0] if is_number else line

    def _hand_out(self, name: str, line: Tensor, seen: Mapping[Tensor, MutableMapping[str, Any]]) -> None:
        if name in self._numbers:
            for parameter, number in zip(self.parameters, line.unbind(), strict=True):
                seen[parameter][name] = number
            return
        parts = torch.split(line, [local_of(p).numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            seen[parameter][name] = as_seen(parameter, part.view(local_of(parameter).shape))

    def record(self) -> None:
        """Record that the numbers are equal; lines may share memory, so `finish` must run for all first."""
        self._written = [numbers._version for numbers in self._numbers.values()]


def as_seen(parameter: DTensor, value: Any) -> Any:
    """Return a state as users see the state: shards as a `DTensor`, any other value unchanged."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != local_of(parameter).shape:
        return value
    if value.dtype == parameter.dtype:
        return dtensor_like(parameter, value)
    return as_dtensor(parameter, value, len(parameter))


def alike(states: Sequence[Mapping[str, Any]], parameters: Sequence[DTensor]) -> bool:
    """Return whether states may be joined: equal names, and shards like the parameters' or equal numbers."""
    first = states[0]
    return all(state.keys() == first.keys() for state in states) and all(
        _may_join([state[name] for state in states], parameters) for name in first
    )


def _may_join(values: Sequence[Any], parameters: Sequence[DTensor]) -> bool:
    first = values[0]
    if not isinstance(first, Tensor):
        return all(not isinstance(value, Tensor) and value == first for value in values)
    if not all(isinstance(value, Tensor) and value.dtype == first.dtype for value in values):
        return False
    if first.dim() == 0:
        return all(value.dim() == 0 and bool(value == first) for value in values)
    return all(v.shape == local_of(p).shape for v, p in zip(values, parameters, strict=True))
