"""The type of an entry in the table of `redistributions.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.types.placements import Partial, Placement
from fxdp.ir.types.value_types import TensorType

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of an emitted program, and its arguments."""


class Emission(Protocol):
    """Context for the functions that emit a redistribution, given beside the value."""

    group: str
    """The name of the process group that carries the value."""
    world: int
    """The number of ranks in the group."""
    index: int
    """This rank's index in the group."""
    number: int
    """The index of this part of the batch among those of all ranks and micro-batches."""
    dtype: torch.dtype
    device: str
    """The type of the device on which the program runs."""
    shown: bool
    """True if the gather is zero-copy: ranks read each shard over shared memory instead of sending it."""

    def size(self, name: str) -> fx.Node:
        """Return the size input `B`, `b` or `offset` of the value's axis."""

    def largest(self) -> fx.Node | None:
        """Return the size input of the largest part, or None if all parts are equal."""

    def rows(self) -> fx.Node | None:
        """Return the positions of real rows among gathered, padded parts, or None if all parts are equal."""

    def part(self, value: fx.Node, dim: int, outer: int) -> Call:
        """Return the call that takes this rank's part of a replicated value."""


Transport: TypeAlias = Literal["group", "messages", "memory", "hosts"]
"""The transport of a value.

`group`: the mesh's process group. `messages`: messages of the calling thread. `memory`: memory that all ranks
share. `hosts`: shared memory within each of several hosts, and a process group between hosts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """Properties of one redistribution function of `redistributions.py`.

    Attributes
    ----------
    target : the function.
    takes, gives : the kinds of placement before and after.
    reduces : the only reduction of Partial values that the function can do; empty if an argument names the
        reduction.
    arguments : the function's arguments after the value, from the type and both placements.
    price : bytes that a rank sends, up to a common factor, for a value of the given bytes; the second
        argument is the bytes sent if the value is gathered where it is smallest, before a cast or an
        expansion.
    on_ranks : every rank's result, from all ranks' values, their batch sizes, and the arguments.
    start : emits the function that starts the redistribution, or does all of a local one.
    finish : emits the function that waits, given the pending value; None for a local redistribution.
    words : the description in a report; empty for a local redistribution.
    branches : transports on CPU for values of static size; all dynamic ones use the group.
    along : the data axis along which both placements differ; None: all.
    suits : further conditions on both placements.
    axis : the data axis along which a node redistributes; None: all.
    """

    target: Callable[..., Any]
    takes: type[Placement]
    gives: type[Placement]
    arguments: Callable[[TensorType, Placement, Placement], tuple[Any, ...]]
    price: Callable[[float, float], float]
    on_ranks: Callable[..., list[Tensor]]
    start: Callable[..., Call]
    finish: Callable[..., Call] | None = None
    words: str = ""
    reduces: str = ""
    branches: tuple[Transport, ...] = ("group",)
    along: Callable[[Placement, Placement], str | None] = lambda have, want: None
    suits: Callable[[Placement, Placement], bool] = lambda have, want: True
    axis: str | None = None

    @property
    def communicates(self) -> bool:
        """True if ranks communicate, so that a `wait` follows."""
        return self.finish is not None

    def converts(self, have: Placement, want: Placement) -> bool:
        """Return whether this redistribution turns `have` into `want`."""
        known = not isinstance(have, Partial) or self.reduces in ("", have.op)
        kinds = isinstance(have, self.takes) and isinstance(want, self.gives)
        return kinds and known and self.suits(have, want)

    def reduction(self, node: fx.Node) -> Any:
        """Return the reduction of a Partial value by `node`, a call of this redistribution."""
        return self.reduces or node.args[1]
