"""Rows of parameters that lie side by side, as one: so an optimizer steps many small parameters in one go.

    rows         | w1 ..   | b1 | w2 ..   |    views of one buffer, as sharded parameters are
    gradients    | w1 ..   | b1 | w2 ..   |    what a bucket of sums has left
    exp_avg      | w1 ..   | b1 | w2 ..   |    one tensor; users see a `DTensor` over each part
    step         | 3       | 3  | 3       |    a number for each, in one tensor; the first is stepped

Only elements that an optimizer steps by themselves may be joined so.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import eq, sub
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxdp.ir.adjoining import line_of
from fxdp.ir.model_tensors import local_of
from fxdp.module.optimizer_counterpart import as_dtensor
from fxdp.torch_compat import dtensor_like

# torch's kernels round what fills no two vectors of the processor otherwise, and cut by cache lines for their
# threads: behind a multiple of both each element is rounded as it is by itself
_FULL_BYTES = 128
# Bytes of rows that a core's own cache (1 to 2 MiB) holds beside their gradients, two states and a result.
# AdamW's ten ops on 2.6 million elements: 6.8 ms as one, 4.1 in lines of 64 to 660 KB, 5.3 on 80 parameters.
_IN_CACHE = 2**18


def room(rows: Tensor) -> int:
    """Behind so many bytes others may be joined to rows; -1 if none may."""
    full = rows.numel() > 0 and rows.nbytes % _FULL_BYTES == 0 and rows.is_contiguous()
    # complex values may be conjugated when read, each tensor for itself
    return rows.nbytes if full and not rows.is_complex() else -1


def process_mesh(tensors: Sequence[Tensor | None], rooms: Sequence[int]) -> list[bool]:
    """Whether each of several tensors but the last goes on in the next, behind so many bytes."""
    # at each step for each parameter: what is done for all by one call is ten times as fast
    there: list[Any] = [tensor for tensor in tensors if tensor is not None]
    if not all(map(Tensor.is_contiguous, there)):
        return [False] * len(rooms)
    at = [*map(Tensor.data_ptr, there)]
    if len(at) < len(tensors):
        at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return list(map(eq, map(sub, at[1:], at), rooms))


def in_cache(process_mesh: Sequence[bool], tensors: Sequence[Tensor]) -> list[bool]:
    """What is joined, in lines that the processor's cache holds: each op runs over a complete line."""
    found, line = [], 0
    for goes_on, one, following in zip(process_mesh, tensors, tensors[1:], strict=False):
        line += one.nbytes
        found.append(goes_on and (not one.is_cpu or line + following.nbytes <= _IN_CACHE))
        line *= found[-1]
    return found


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that follow one another in memory as one line, without a copy; None if they do not."""
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return None
    return line_of(tensors, [tensor.numel() for tensor in tensors])


def in_one_memory(some: Tensor, other: Tensor) -> bool:
    """Whether both lie in the same allocation: neighbours in different ones are no line."""
    return some.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def line_from(first: Tensor, count: int) -> Tensor | None:
    """So many elements of the memory in which a tensor lies, from there on; None if it ends before."""
    if first.storage_offset() + count > first.untyped_storage().nbytes() // first.itemsize:
        return None  # two allocations that happen to be neighbours
    return first.detach().as_strided((count,), (1,))


@dataclass
class FlatShards:
    """Rows of several parameters as one, and their states."""

    parameters: list[DTensor]
    flat: Tensor
    state: dict[str, Any]
    """What the optimizer has for `flat`; empty before its first step."""
    _numbers: dict[str, Tensor] = field(default_factory=dict)
    """The states that are a number: one for each parameter, all equal."""
    _others: dict[str, Tensor] = field(default_factory=dict)
    """The same without the first, which is stepped."""
    _known: dict[str, Any] = field(default_factory=dict)
    """What of `state` the parameters have their parts of."""
    _written: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, parameters: list[DTensor], states: Sequence[Mapping[str, Any]],
        seen: Mapping[Tensor, MutableMapping[str, Any]],
    ) -> FlatShards:  # fmt: skip
        """Parameters whose rows lie side by side in one memory, with rows of their states, which are alike.

        `seen` is what users have as states: where those did not lie side by side yet, they get others.
        """
        flat = as_one([local_of(p) for p in parameters])
        assert flat is not None
        made = cls(parameters, flat, {})
        for name, value in states[0].items():
            if not isinstance(value, Tensor):
                made.state[name] = value
                continue
            values = [state[name] for state in states]
            one = as_one(values)
            line = torch.cat([value.reshape(-1) for value in values]) if one is None else one
            made._take(name, line, is_number=value.dim() == 0)
            if one is None:
                made._hand_out(name, line, seen)
        made.meta()
        return made

    def in_step(self) -> bool:
        """Whether nobody has written the numbers since `meta`, so that they are equal."""
        return self._written == [numbers._version for numbers in self._numbers.values()]

    def finish(self, own: dict[str, Any], seen: Mapping[Tensor, MutableMapping[str, Any]]) -> None:
        """Let the parameters have their parts of the states that a step has left."""
        self.flat.grad = None  # or it would outlive the parameters'
        self.state = own
        for name, value in list(own.items()):
            if self._known.get(name, self) is not value:
                self._adopt(name, value, seen)
            elif (others := self._others.get(name)) is not None:
                others.copy_(value)

    def _adopt(self, name: str, value: Any, seen: Mapping[Tensor, MutableMapping[str, Any]]) -> None:
        """A state that the step has made."""
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

    def meta(self) -> None:
        """Remember that the numbers are equal; lines may share a memory, so first all must `finish`."""
        self._written = [numbers._version for numbers in self._numbers.values()]


def as_seen(parameter: DTensor, value: Any) -> Any:
    """A state as users have it: rows as a `DTensor`, anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != local_of(parameter).shape:
        return value
    if value.dtype == parameter.dtype:
        return dtensor_like(parameter, value)
    return as_dtensor(parameter, value, len(parameter))


def alike(states: Sequence[Mapping[str, Any]], parameters: Sequence[DTensor]) -> bool:
    """Whether states of parameters may be joined: by the same names rows like theirs, or equal numbers."""
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
