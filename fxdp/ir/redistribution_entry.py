"""What is asked of one redistribution: an entry of the table in `redistributions.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.placements import Partial, Placement
from fxdp.ir.types import TensorType


class Emission(Protocol):
    """What the functions of an emitted program are called with, beside the value itself."""

    group: str
    """The name of the process group that carries the value."""
    world: int
    """How many ranks the group joins."""
    index: int
    """This rank's place among them, or the part's where micro-batches split the batch further."""
    dtype: torch.dtype
    shown: bool
    """Whether rows are not sent, but shown to the other ranks where they lie."""

    def size(self, name: str) -> fx.Node:
        """The size slot of this name."""

    def largest(self) -> fx.Node | None:
        """The size slot of the largest part; None where all are equal."""

    def rows(self) -> fx.Node | None:
        """Where the real rows of gathered, padded parts lie; None where all are equal."""


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of an emitted program and its arguments."""

Transport: TypeAlias = Literal["group", "messages", "memory", "hosts"]
"""What carries a value: the mesh's process group, messages of the calling thread, memory that all ranks
share, or memory within each of several hosts and a process group between them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """All there is to know of one function of this file.

    Attributes
    ----------
    target : the function.
    takes, gives : the kinds of placement that it turns into one another.
    reduces : the one reduction of Partial values that it can do; empty where its argument names it.
    arguments : its arguments after the value, from type and both placements.
    price : bytes that a rank sends, to a factor common to all, for a value of so many bytes; the second
        number is what is sent if the value is gathered where it is smallest, before a cast or an expansion.
    on_ranks : every rank's result, from all ranks' values, their batch sizes, and the arguments.
    start : the function that starts it in an emitted program, or does all of it.
    finish : the function that waits, given what is pending; None for what is local.
    words : what becomes of a value that travels so, in a report; empty for what is local.
    ways : how it may travel on CPU if the value's size is fixed; else by the group.
    along : along which data axis it turns the one placement into the other; None: all.
    suits : further conditions on both placements.
    axis : along which data axis; None: all.
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
        """Whether ranks exchange something, so that a `wait` belongs to it."""
        return self.finish is not None

    def converts(self, have: Placement, want: Placement) -> bool:
        """Whether it turns the one into the other."""
        known = not isinstance(have, Partial) or self.reduces in ("", have.op)
        kinds = isinstance(have, self.takes) and isinstance(want, self.gives)
        return kinds and known and self.suits(have, want)

    def reduction(self, node: fx.Node) -> Any:
        """How `node`, a call of it, reduces a Partial value."""
        return self.reduces or node.args[1]
