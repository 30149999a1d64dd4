"""Unsharded parameters that live from call to call, until rows change: `strategy="optimizer"`.

    call 1     rows gathered                    %w_whole made
    call 2     (accumulates)                    the same %w_whole
    step()     rows of this rank stepped on     %w_whole is old
    call 3     rows gathered                    the old one goes, a new one comes

A rank knows whether its own rows have changed; whether any rank's have, the exchange before each call says.
So all ranks gather at the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxdp.ir.model_tensors import local_of, sharding_of
from fxdp.ir.ops.parameter_shards import shard_range

Key: TypeAlias = "tuple[str, torch.dtype]"
"""A full value: the parameter's name, and the dtype in which it is read."""
Place: TypeAlias = "tuple[int, str, torch.dtype]"
"""The same on a pipeline rank."""


@dataclass(frozen=True)
class Gathered:
    """What one program reads.

    Attributes
    ----------
    places : all full values, on this pipeline rank and on others; the same on all ranks.
    own : this rank's, by the names under which the program reads them.
    """

    places: frozenset[Place]
    own: Mapping[str, Key]


@dataclass
class UnshardedParameters:
    """The full values of one model, which all of its programs share."""

    module: nn.Module
    _values: dict[Key, Tensor] = field(default_factory=dict)
    _copies: dict[str, Tensor] = field(default_factory=dict)
    """This rank's rows of what other pipeline ranks alone have full, as they were."""
    _places: set[Place] = field(default_factory=set)
    _written: list[tuple[Tensor, int]] = field(default_factory=list)
    """Of each buffer of rows one tensor in it, and how often the buffer was written."""
    _stepped: bool = False

    def note_step(self) -> None:
        """An optimizer that has parameters of the model steps."""
        self._stepped = True

    def changed(self) -> bool:
        """Whether this rank's rows are no longer those that were gathered.

        Steps and writes into rows are seen at once. What is written through a `DTensor` is counted on the
        `DTensor` at best (`p.data.mul_()` and `torch._foreach_mul_([p])` on nothing at all), so where no step
        was taken the rows are compared, bit by bit: 1/ranks of what the forward is about to read.
        """
        if not self._places:
            return False
        if self._stepped or any(rows._version != count for rows, count in self._written):
            return True
        with torch.no_grad():
            return any(not _alike(now, then) for now, then in self._pairs())

    def drop(self) -> None:
        """Let go of all values: some rank's rows have changed."""
        self._values.clear()
        self._copies.clear()
        self._places.clear()

    def of(self, wanted: Gathered, gather: Callable[[], Sequence[Tensor]]) -> dict[str, Tensor]:
        """The values that a program reads, by its names; gathered now if one of them is missing on any rank.

        `gather` gives this rank's in the order of `wanted.own`; all ranks call this together.
        """
        if not wanted.places <= self._places:
            # values that are to be saved for a backward must not be made in inference mode
            with torch.inference_mode(False), torch.no_grad():
                self._values.update(zip(wanted.own.values(), gather(), strict=True))
                self._copy({name for _, name, _ in wanted.places} - {name for name, _ in self._values})
            self._places |= wanted.places
            self._written, self._stepped = self._counted(), False
        return {name: self._values[key] for name, key in wanted.own.items()}

    def _copy(self, names: Iterable[str]) -> None:
        for name in names:
            self._copies.setdefault(name, local_of(self.module.get_parameter(name)).clone())

    def _counted(self) -> list[tuple[Tensor, int]]:
        shards = [local_of(p) for p in self.module.parameters() if isinstance(p, DTensor)]
        found = {rows.untyped_storage().data_ptr(): rows for rows in shards}
        return [(rows, rows._version) for rows in found.values()]

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This rank's rows, and those that were gathered."""
        for (name, dtype), full in self._values.items():
            parameter = self.module.get_parameter(name)
            assert isinstance(parameter, DTensor)
            first, last = shard_range(len(full), sharding_of(parameter))
            yield local_of(parameter).to(dtype), full[first:last]
        for name, rows in self._copies.items():
            yield local_of(self.module.get_parameter(name)), rows


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _alike(now: Tensor, then: Tensor) -> bool:
    """Whether the bits are equal: values that are not finite are, too, and -0.0 is not 0.0."""
    words = _WORDS.get(now.element_size())
    if words is None or not now.is_contiguous() or not then.is_contiguous():
        return torch.equal(now, then)
    return torch.equal(now.view(words), then.view(words))
