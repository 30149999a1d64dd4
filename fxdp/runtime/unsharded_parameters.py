"""Unsharded parameters that live across calls, until a shard changes: `strategy="optimizer"`.

    call 1     all-gather of shards             %w_full is created
    call 2     (accumulates)                    the same %w_full
    step()     this rank's shard is updated     %w_full is outdated
    call 3     all-gather of shards             %w_full is replaced

A rank knows whether its own shards have changed; the exchange before each call finds changes on any rank. So
all ranks gather in the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxdp.ir.graph.model_tensors import local_of, sharding_of
from fxdp.ir.ops.parameter_shards import shard_range

Key: TypeAlias = "tuple[str, torch.dtype]"
"""Key of an unsharded parameter: name, and the dtype in which the parameter is read."""
_Place: TypeAlias = "tuple[int, str, torch.dtype]"
"""Key of an unsharded parameter on a pipeline rank: number, name and dtype."""


@dataclass(frozen=True)
class Gathered:
    """The unsharded parameters that a program reads.

    Attributes
    ----------
    places : the unsharded parameters on this pipeline rank and on all others; equal on all ranks.
    own : this rank's unsharded parameters, by the names under which the program reads each.
    """

    places: frozenset[_Place]
    own: Mapping[str, Key]


@dataclass
class UnshardedParameters:
    """The unsharded parameters of a model, shared by all programs of the model."""

    module: nn.Module
    _values: dict[Key, Tensor] = field(default_factory=dict)
    _copies: dict[str, Tensor] = field(default_factory=dict)
    """Copies of this rank's shards of parameters that only other pipeline ranks unshard."""
    places: set[_Place] = field(default_factory=set)
    """The parameters that are unsharded now, on all ranks."""
    _written: list[tuple[Tensor, int]] = field(default_factory=list)
    """One tensor of each buffer of shards, with torch's version count of the buffer."""
    _stepped: bool = False

    def note_step(self) -> None:
        """Record a step of an optimizer with parameters of the model."""
        self._stepped = True

    def changed(self) -> bool:
        """Return whether this rank's shards differ from the gathered shards.

        Steps and in-place writes into shards are detected at once. A write through a `DTensor` is counted on
        the `DTensor` at best (and not at all for `p.data.mul_()` and `torch._foreach_mul_([p])`). So without
        a step, shards are compared bit by bit: 1/ranks of the bytes that the forward is about to read.
        """
        if not self.places:
            return False
        if self._stepped or any(rows._version != count for rows, count in self._written):
            return True
        with torch.no_grad():
            return any(not _alike(now, then) for now, then in self._pairs())

    def drop(self) -> None:
        """Drop all values, because a shard has changed on some rank."""
        self._values.clear()
        self._copies.clear()
        self.places.clear()

    def of(self, wanted: Gathered, gather: Callable[[], Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return a program's unsharded parameters by name; gather now if one is missing on any rank.

        `gather` returns this rank's values in the order of `wanted.own`. All ranks call together.
        """
        if not wanted.places <= self.places:
            # values saved for a backward must not be created in inference mode
            with torch.inference_mode(False), torch.no_grad():
                self._values.update(zip(wanted.own.values(), gather(), strict=True))
                self._copy({name for _, name, _ in wanted.places} - {name for name, _ in self._values})
            self.places |= wanted.places
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
        """Yield pairs of this rank's present shards and the shards at the last gather."""
        for (name, dtype), full in self._values.items():
            parameter = self.module.get_parameter(name)
            assert isinstance(parameter, DTensor)
            first, last = shard_range(len(full), sharding_of(parameter))
            yield local_of(parameter).to(dtype), full[first:last]
        for name, rows in self._copies.items():
            yield local_of(self.module.get_parameter(name)), rows


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _alike(now: Tensor, then: Tensor) -> bool:
    """Return whether two tensors have equal bits, so that nan equals nan, and -0.0 differs from 0.0."""
    words = _WORDS.get(now.element_size())
    if words is None or not now.is_contiguous() or not then.is_contiguous():
        return torch.equal(now, then)
    return torch.equal(now.view(words), then.view(words))
