"""The two callables of a lowered program and their calling convention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from fxdp.lowering.backward import add_to_buffers, split_backward, without_tangents

Boxed: TypeAlias = Callable[[list[Any]], "list[Any] | tuple[Any, ...]"]
"""Takes its arguments in one list, which it empties, so that they can be freed while it runs."""


@dataclass(frozen=True)
class LoweredBackward:
    """One compiled backward: `run(saved + tangents)`, with the tangents numbered `tangents`.

    It returns a gradient or None per input of the forward.
    """

    run: Boxed
    tangents: tuple[int, ...]


@dataclass
class ForwardBackward:
    """A program cut into forward and backward.

    `forward(inputs)` takes a value per input slot (tangents aside) and returns the outputs, then what the
    backward needs; new values of buffers are written in place. Backwards are compiled for the set of
    tangents that are not zero: the one that a training loop uses at once, others when they are needed.
    """

    forward: Boxed
    outputs: int
    """How many of forward's results are outputs; the others are saved for the backward."""
    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None = None
    """The entire backward, for all tangents."""
    saved_order: tuple[int, ...] = ()
    """For each input of the backward before the tangents, its position among the saved values."""
    tangents: int = 0
    compile: Callable[[fx.GraphModule, bool], Boxed] | None = None
    """Makes code of a backward, or of (True) half of one, whose results keep the strides that the other half
    was traced with."""
    summed: tuple[int, ...] = ()
    """The backward's results that it adds to buffers, which it takes last, instead of returning them."""
    anew: Callable[[], ForwardBackward] | None = None
    """Of code from the disk, whose graphs hold no more than their collectives: the same halves with all."""
    compiled: dict[frozenset[int], LoweredBackward] = field(default_factory=dict, repr=False)
    """The backwards that there are, by the tangents that are zero."""
    compiled_pair: dict[tuple[int, ...], tuple[Boxed, Boxed]] = field(default_factory=dict, repr=False)
    """Those in two halves, by the results that come first."""
    _full: ForwardBackward | None = field(default=None, repr=False)

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.backward_graph is not None

    def backward(self, zero: frozenset[int]) -> LoweredBackward:
        """The backward for calls in which the tangents numbered `zero` are zero."""
        found = self.compiled.get(zero)
        if found is None and self.anew is not None:
            found = self.compiled[zero] = self._made_anew().backward(zero)
        if found is None:
            assert self.backward_graph is not None
            assert self.compile is not None
            graph, kept = without_tangents(self.backward_graph, sorted(zero), self.tangents)
            graph = add_to_buffers(graph, self.summed) if self.summed else graph
            found = self.compiled[zero] = LoweredBackward(self.compile(graph, False), kept)
        return found

    def halved(self, first: tuple[int, ...]) -> tuple[Boxed, Boxed]:
        """The backward for all tangents in two: its results numbered `first`, then the others.

        The first half gives what the second one takes after its results. None of `first` is summed.
        """
        found = self.compiled_pair.get(first)
        if found is None and self.anew is not None:
            found = self.compiled_pair[first] = self._made_anew().halved(first)
        if found is None:
            assert self.backward_graph is not None
            assert self.compile is not None
            inputs, weights = split_backward(self.backward_graph, first)
            if self.summed:
                # the second half numbers its results without the first one's
                later = tuple(i - sum(f < i for f in first) for i in self.summed)
                weights = add_to_buffers(weights, later)
            found = self.compiled_pair[first] = self.compile(inputs, True), self.compile(weights, True)
        return found

    def _made_anew(self) -> ForwardBackward:
        assert self.anew is not None
        if self._full is None:
            self._full = self.anew()
        return self._full
