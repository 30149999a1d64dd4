"""The two callables of a lowered program and their calling convention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

Boxed: TypeAlias = Callable[[list[Any]], "list[Any] | tuple[Any, ...]"]
"""Takes its arguments in one list, which it empties, so that they can be freed while it runs."""


@dataclass(frozen=True)
class Halves:
    """A program cut into forward and backward.

    `forward(inputs)` takes a value per input slot (tangents aside) and returns the outputs, then what the
    backward needs; new values of buffers are written in place. `backward(saved + tangents)` returns one
    gradient or None per input of the forward.
    """

    forward: Boxed
    backward: Boxed | None
    outputs: int
    """How many of forward's results are outputs; the others are saved for the backward."""
    saved_order: tuple[int, ...] = ()
    """For each input of the backward before the tangents, its position among the saved values."""
    forward_graph: fx.GraphModule | None = None
    backward_graph: fx.GraphModule | None = None
