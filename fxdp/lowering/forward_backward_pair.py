"""The two callables of a lowered program, with their calling convention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from fxdp.lowering.backward import add_to_buffers, split_backward, without_tangents

Boxed: TypeAlias = Callable[[list[Any]], "list[Any] | tuple[Any, ...]"]
"""A function of one list of arguments, which is emptied so that arguments can be freed during the call."""


@dataclass(frozen=True)
class LoweredBackward:
    """A compiled backward: `run(saved + tangents)`, with only the tangents numbered `tangents`.

    The result has a gradient or None per input of the forward.
    """

    run: Boxed
    tangents: tuple[int, ...]


@dataclass
class ForwardBackward:
    """A program partitioned into forward and backward.

    `forward(inputs)` takes one value per input of the signature (except tangents), and returns the outputs,
    followed by the values saved for the backward; new values of buffers are written in place. A backward is
    compiled per set of nonzero tangents: at once for the set of a training loop, on demand for all other
    sets.
    """

    forward: Boxed
    outputs: int
    """The number of outputs among the forward's results; the remaining results are saved for the backward."""
    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None = None
    """The full backward, for all tangents."""
    saved_order: tuple[int, ...] = ()
    """For each input of the backward before the tangents, the position among the saved values."""
    tangents: int = 0
    compile: Callable[[fx.GraphModule, bool], Boxed] | None = None
    """Compiles a backward; the flag is True for one of two split graphs, which must keep traced strides."""
    summed: tuple[int, ...] = ()
    """The numbers of backward results that are added to buffers (the last arguments), and not returned."""
    anew: Callable[[], ForwardBackward] | None = None
    """Compiles the pair anew with full graphs; for a pair from disk, whose graphs hold only collectives."""
    compiled: dict[frozenset[int], LoweredBackward] = field(default_factory=dict, repr=False)
    """The compiled backwards, keyed by the set of zero tangents."""
    compiled_pair: dict[tuple[int, ...], tuple[Boxed, Boxed]] = field(default_factory=dict, repr=False)
    """The compiled split backwards, keyed by the results of the first graph."""
    _full: ForwardBackward | None = field(default=None, repr=False)

    @property
    def trains(self) -> bool:
        """True if the program has a backward."""
        return self.backward_graph is not None

    def backward(self, zero: frozenset[int]) -> LoweredBackward:
        """Return the backward for calls in which the tangents numbered `zero` are zero."""
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
        """Return the backward for all tangents, split in two; the first graph computes the results `first`.

        The first callable also returns the arguments of the second, after the results. No result in `first`
        may be summed into a buffer.
        """
        found = self.compiled_pair.get(first)
        if found is None and self.anew is not None:
            found = self.compiled_pair[first] = self._made_anew().halved(first)
        if found is None:
            assert self.backward_graph is not None
            assert self.compile is not None
            inputs, weights = split_backward(self.backward_graph, first)
            if self.summed:
                # results of the second graph are numbered without the results of the first
                later = tuple(i - sum(f < i for f in first) for i in self.summed)
                weights = add_to_buffers(weights, later)
            found = self.compiled_pair[first] = self.compile(inputs, True), self.compile(weights, True)
        return found

    def _made_anew(self) -> ForwardBackward:
        assert self.anew is not None
        if self._full is None:
            self._full = self.anew()
        return self._full
